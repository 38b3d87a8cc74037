"""An engine that sleeps while the learner works: the run is that of an engine that does not, and memory is freed."""

import math

import jax
import pytest
from resumed_runs import here, kill, resume, same_run, whole_run  # noqa: F401  (a fixture, and its kin)
from test_main import go
from test_main_tail_batching import VERIFIED

from jaxrl_post.engine.row_engine import MeshDevice
from jaxrl_post.runs.checkpoint import store

pytestmark = pytest.mark.usefixtures("quick_compilation")

OWN = ("--config.engine.dtype=bfloat16", "--config.steps=6", "--config.checkpoint.every=2")
RUNS = {
    "rounds": (*OWN, "--config.mesh.fsdp=2", "--config.mesh.engine_tensor=2"),
    "two_updates": (*OWN, "--config.scheduler.mini_batches=2"),
    "tail_batching": (*VERIFIED, "--config.engine.dtype=bfloat16"),
    "drafts": (*OWN, "--config.speculation.drafter=ngram"),
    "shared": ("--config.steps=3",),
}


def held(leaves) -> int:
    """Returns the bytes of arrays on all devices. A shard is not read, because reading it would keep it."""
    return sum(
        math.prod(leaf.sharding.shard_shape(leaf.shape)) * leaf.dtype.itemsize * len(leaf.sharding.device_set)
        for leaf in leaves
    )


@pytest.mark.shown("exact-scale")
@pytest.mark.parametrize("name", RUNS)
def test_a_run_whose_engine_sleeps_is_the_same(here, name, monkeypatch):  # noqa: F811
    """Every file, weight and decision is equal. Pages are always freed, and weights where the engine has its own."""
    whole, slept, freed = whole_run(here, f"awake_{name}", *RUNS[name]), here / f"slept_{name}", []
    sleep = MeshDevice.sleep

    def watched(device):
        awake = device.state is not None
        own = jax.tree.leaves((device.state, device.tables, device.params if awake and device.owned else ()))
        expected, before = held(own), held(jax.live_arrays())
        sleep(device)
        freed.append((expected, before - held(jax.live_arrays())))

    monkeypatch.setattr(MeshDevice, "sleep", watched)
    assert resume(here, slept, *RUNS[name], "--config.engine.sleep=True") == 0
    assert sum(expected > 0 for expected, _ in freed) >= 3
    assert all(found >= expected for expected, found in freed)
    same_run(whole, slept)


@pytest.mark.extended
def test_killed_while_it_sleeps(here, capsys):  # noqa: F811
    flags = (*OWN, "--config.engine.sleep=True")
    whole, target = whole_run(here, "sleeping", *flags), here / "sleeping_killed"
    kill(here, target, store, "manifest", 2, flags=flags)
    assert resume(here, target, *flags) == 0
    assert "goes on after step" in capsys.readouterr().out
    same_run(whole, target)


@pytest.mark.extended
def test_an_engine_that_works_beside_the_learner_does_not_sleep(here, capsys):  # noqa: F811
    assert go(here, "--config.engine.sleep=True", "--config.scheduler.name=pipeline") == 1
    assert "engine.sleep=True frees the engine while the learner works" in capsys.readouterr().err
