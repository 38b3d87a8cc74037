"""An engine in a process without its devices: by the results that another tells, it decides and returns what that one does."""

from types import SimpleNamespace

import engine_lab as lab
import jax
import numpy as np
import pytest

from jaxrl_post.config import load, resolve
from jaxrl_post.engine import merged_weights
from jaxrl_post.engine.whole_hosts import DistantDevice, TellingDevice
from jaxrl_post.launch.jobs import roles
from jaxrl_post.launch.parts import build
from jaxrl_post.parallel import exchange
from jaxrl_post.parallel import mesh as meshes
from jaxrl_post.trainer.state import abstract
from jaxrl_post.trainer.whole_hosts import Row


@pytest.fixture
def job(monkeypatch):
    """A job of two processes in one: `at` is the process that runs, and the coordinator's store is a dict."""
    found = SimpleNamespace(at=0, store={})
    monkeypatch.setattr(jax, "process_index", lambda: found.at)
    monkeypatch.setattr(exchange, "put", found.store.__setitem__)
    monkeypatch.setattr(exchange, "get", lambda key, limit_s: found.store[key])
    monkeypatch.setattr(exchange, "drop", found.store.__delitem__)
    monkeypatch.setattr(exchange, "meet", lambda: None)
    return found


def distant(results):
    """Makes a DistantDevice whose weights are shapes."""

    def layout(model, params, mesh, dtype, weights):
        return SimpleNamespace(
            case=lambda params: "relayout",
            links=lambda params: {},
            place=abstract,
            check=lambda old, new, finite: None,
            replace=lambda old, new: old,
        )

    return lambda *given: DistantDevice(results, layout, *given)


def telling(results):
    return lambda *given: TellingDevice(results, merged_weights.layout, *given)


def turned(one, asked, params):
    """Runs requests with a swap in their midst. Returns every finished rollout in the order of dispatches, and the counts."""
    one.submit(asked)
    out, version = [], 1
    while one.pending:
        out.append(one.step())
        if len(out) in (3, 6):
            one.swap(params, version)
            version += 1
    told = [
        [(r.id, r.finish, r.finish_clock, r.tokens.tobytes(), r.logprobs.tobytes(), r.versions.tobytes()) for r in some]
        for some in out
    ]
    return told, one.metrics(), one.clock


@pytest.mark.parametrize("drafter", [pytest.param(None, marks=pytest.mark.extended), "ours"])
def test_a_process_without_devices_decides_as_one_that_has_them(job, drafter):
    mesh = meshes.make_mesh()
    params = meshes.put(lab.weights(0), meshes.param_shardings(mesh, lab.decoder.axes(lab.TINY), "engine"))
    asked, runs = lab.requests(40, longest=60), []
    past = lab.groups_of(asked, lab.run(lab.engine(), asked)) if drafter else ()
    for job.at, device in ((0, telling), (1, distant)):
        more = dict(drafting=lab.drafting(drafter, past), cost=lab.FREE_ROWS) if drafter else {}
        one = lab.made(lab.TINY, params, mesh, device=device(exchange.Relay("dispatch", 0)), **more)
        runs.append(turned(one, asked, params))
    assert runs[0] == runs[1] and sum(map(len, runs[0][0])) == 40 and len(runs[0][0]) > 8
    assert not drafter or runs[1][1]["spec/num_accepted"] > 0


def test_metrics_are_told_when_they_are_read_and_dropped_two_publishes_later(job):
    sides = []
    for job.at in (0, 1):
        relays = exchange.Relays()
        relays.open = lambda topic, teller, relays=relays: (
            relays._all.append(exchange.Relay(topic, teller)) or relays._all[-1]
        )
        sides.append((relays, relays.open("metrics", 0)))
    (first, tells), (second, hears) = sides
    job.at = 1
    heard = Row(hears, None)
    with pytest.raises(KeyError):
        len(heard)  # in a real store it waits
    job.at = 0
    value = float(np.float32(1 / 3))
    assert Row(tells, lambda: {"actor/grad_norm": value}) == {"actor/grad_norm": value}
    job.at = 1
    assert dict(heard) == {"actor/grad_norm": value} and dict(heard) == {"actor/grad_norm": value}
    held = []
    for _ in range(3):
        for job.at, side in ((0, first), (1, second)):
            side.release_received()
        held.append(len(job.store))
    assert held == [1, 0, 0]


@pytest.mark.parametrize(
    "given, sentence",
    [
        ("lora.rank=4", "lora.rank=4 does not work where whole hosts learn .* the nearest valid mesh.engine is 0"),
        ("scheduler.lend=0.5", "scheduler.lend: each of 2 processes lends half .* the nearest valid lend is 0"),
    ],
)
def test_what_whole_hosts_cannot_do_is_refused_in_the_plan(given, sentence):
    options = ["mesh.fsdp=2", "mesh.engine=2", given]
    options += ["scheduler.stream=8", "optimizer.lr=0.001"] if "lend" in given else []
    config = resolve(load("configs/demo.py"), options)
    with pytest.raises(ValueError, match=sentence):
        build.device_plan(config, roles.planned_here(2, 4))
