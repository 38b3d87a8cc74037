"""A checkpoint is a swap boundary: the saved engine and the resumed engine give equal rollouts, bit for bit."""

import engine_lab as lab
import numpy as np
import pytest
from test_engine_demonstrations import PROMPTS, request, write
from test_scheduler_rounds_rounds import accuracies, drive, make
from toy_ring import ToyPrompts

from jaxrl_post.engine.demonstrations import Demonstrations
from jaxrl_post.engine.host.sequence import to_state
from jaxrl_post.models import decoder
from jaxrl_post.parallel import mesh as meshes
from jaxrl_post.runs.checkpoint.host_state import read_state, write_state
from jaxrl_post.scheduler.decision_log import Recorder
from jaxrl_post.scheduler.rounds.rounds import Sync

pytestmark = pytest.mark.usefixtures("quick_compilation")

SMALL = dict(slots=6, pages=40, max_length=96, row_sizes=(64,))


def end(engine):
    out = {}
    while engine.pending:
        out |= {rollout.id: rollout for rollout in engine.step()}
    return out


def placed(seed):
    axes = decoder.axes(lab.TINY)
    return meshes.put(lab.weights(seed), meshes.param_shardings(meshes.make_mesh(), axes, "engine"))


def everything(out):
    return {
        id: (
            r.tokens.tobytes(),
            r.logprobs.tobytes(),
            r.entropies.tobytes(),
            r.versions.tobytes(),
            r.drafted.tobytes(),
            r.finish,
            r.start_clock,
            r.finish_clock,
        )
        for id, r in out.items()
    }


@pytest.fixture(scope="module")
def pair():
    """Returns two engines, so that each compiles once."""
    return lab.engine(**SMALL), lab.engine(**SMALL)


@pytest.mark.parametrize("steps", [1, 3])
def test_live_requests_re_enter_alike(pair, tmp_path, steps):
    """Saves ten requests of mixed versions after a swap: running, waiting, and of evaluation."""
    one, two = pair
    for engine in pair:
        end(engine)
        engine.reset()
    asked = lab.requests(14, samples=2, longest=40, seed=steps)
    by_id = {r.prompt.id: r.prompt for r in asked}
    version = max(one.version, two.version)
    one.submit(asked)
    before = {r.id: r for _ in range(steps) for r in one.step()}
    one.swap(placed(1), version + 1)
    state = one.state_dict()
    assert one.capacity.slots == (max(6 - (14 - len(before)), 0),) and one.capacity.pages == (40,)
    write_state(tmp_path / "state", state)
    two.swap(placed(1), version + 1)
    two.load_state_dict(read_state(tmp_path / "state"), by_id)
    assert (two.clock, two.pending, two.capacity) == (one.clock, one.pending, one.capacity)
    first, second = end(one), end(two)
    assert everything(first) == everything(second) and len(first) + len(before) == 14
    assert one.metrics() == two.metrics() and one.clock == two.clock
    mixed = [r for r in first.values() if len(set(r.versions.tolist())) > 1]
    assert mixed
    new = {r.rollout_id: r for r in asked}
    for rollout in mixed:
        assert not lab.recomputed_after_swap(rollout, new[rollout.id], lab.weights(1), version + 1)


def test_without_the_boundary_the_equality_breaks(pair, tmp_path):
    """Planted fault: the engine that continues keeps its old keys and values."""
    one, two = pair
    for engine in pair:
        end(engine)
        engine.reset()
    asked = lab.requests(6, samples=2, exact=40, seed=5)
    version = max(one.version, two.version)
    one.submit(asked)
    for _ in range(2):
        one.step()
    one.swap(placed(2), version + 1)
    lives = sorted(one.sequences.values(), key=lambda live: live.age)
    slots = [live.slot for live in lives]
    for live in lives:
        live.slot = -1
    state = {
        "age": one._age,
        "clock": dict(one._clock),
        "growth": 1.0,
        "counts": {},
        "row_sizes": [64],
        "cost": one.cost.digest,
        "lives": [to_state(live) for live in lives],
        "drafting": one.drafting.state_dict(),
        "carry": one.swap_policy.state_dict(),
    }
    for live, slot in zip(lives, slots):
        live.slot = slot
    two.swap(placed(2), version + 1)
    two.load_state_dict(state, {r.prompt.id: r.prompt for r in asked})
    assert everything(end(one)) != everything(end(two))


def test_another_cost_table_is_refused(pair):
    state = pair[0].state_dict() | {"cost": "other"}
    with pytest.raises(ValueError, match="was saved under cost table other and would resume under"):
        pair[1].load_state_dict(state, {})


def test_demonstrations_go_on_alike():
    one, two = (Demonstrations(write, slots=4, version=3) for _ in range(2))
    one.submit([request(2), request(0)])
    one.step()
    one.submit([request(1), request(3)])
    two.load_state_dict(one.state_dict(), {prompt.id: prompt for prompt in PROMPTS})
    assert (two.clock, two.pending) == (one.clock, one.pending) == (1, 2)
    for a, b in zip(one.step(), two.step(), strict=True):
        assert a.id == b.id and np.array_equal(a.tokens, b.tokens) and a.finish_clock == b.finish_clock
    assert one.metrics() == two.metrics()


def test_a_scheduler_goes_on_alike():
    """Compares two rounds and two more with four rounds. The recorder's clock continues."""
    lines = [], []
    whole = Recorder(make(ToyPrompts(11), Sync, steps=4), lines[0].append)
    expected = drive(whole, accuracies(1, 0.5, 0.1), 3)
    assert expected[0]
    first = Recorder(make(ToyPrompts(11), Sync, steps=2), lines[1].append)
    drive(first, accuracies(1, 0.5, 0.1), 3)
    state = first.state_dict()
    second = Recorder(make(ToyPrompts(11), Sync, steps=4), lines[1].append)
    second.load_state_dict(state)
    assert second.state_dict() == state
    found = drive(second, accuracies(1, 0.5, 0.1), 3)
    assert found[0] == expected[0][2:]
    again = whole.state_dict()
    assert again["scheduler"]["position"] == second.state_dict()["scheduler"]["position"]
