"""The planner: which layout follows which lengths, with its hysteresis, and what is left of it in a checkpoint."""

import numpy as np
import plain_rollouts
import pytest
import racing_ring as ring

from jaxrl_post.engine.step_cost import DecodeCost
from jaxrl_post.ring.types import Layout, Part, Prompt, RolloutId, Stop
from jaxrl_post.scheduler.decision_log import Recorder
from jaxrl_post.scheduler.forecast import ReplicaCapacity
from jaxrl_post.scheduler.rounds.layout_planner import Planner

MANY, FEW = Layout(4, 1), Layout(2, 2)
# One device reads its weights in 1 s; two read half each and need 0.1 s more for every step. 100 tokens of KV a device.
REPLICAS = {
    MANY: ReplicaCapacity(slots=8, kv_tokens=100, cost=DecodeCost(weights_s=1.0, token_s=0.0, row_s=0.2)),
    FEW: ReplicaCapacity(slots=16, kv_tokens=300, cost=DecodeCost(weights_s=0.5, token_s=0.0, row_s=0.1, fixed_s=0.1)),
}


class Scripted:
    """A scheduler whose rounds have the lengths of a list."""

    def __init__(self, rounds, kind=lambda: ""):
        self.rounds, self.done, self.next_kind = rounds, 0, kind

    def __str__(self):
        return f"round {self.done}"

    def complete(self, rollout):
        return Stop()

    def take(self):
        self.done += 1
        return [Part(fresh=(), groups=(), commit=True, publish=True)]

    def metrics(self):
        return {"sched/num_rounds": 1.0}

    def state_dict(self):
        return {"done": self.done}

    def load_state_dict(self, state):
        self.done = state["done"]


def answer(length):
    zeros = np.zeros(length)
    return plain_rollouts.rollout(
        RolloutId(0, "train", 0, "p", 0), Prompt(id="p", tokens=[1, 2]), zeros, clock=(0, length)
    )


def turn(planner, rounds, kinds=None, now=None):
    """The layout of each round."""
    out = []
    for number, lengths in enumerate(rounds):
        if kinds:
            now[0] = kinds[number]
        out.append(planner.layout())
        for length in lengths:
            planner.complete(answer(length))
            assert planner.layout() == out[-1]  # never within a round
        planner.take()
    return out


# By hand: 32 answers of 5 tokens are 8 a replica in MANY, max(1, 8 * 0.2) = 1.6 s a step, 5 steps: 8.0 s; in FEW 16 a
# replica, max(0.5, 1.6) + 0.1 = 1.7 s: 8.5 s. Four answers of 90: one each, 90 * 1 s = 90 s; in FEW two each, 90 * 0.6 =
# 54 s, though nothing is short of KV.
EVEN, LONE = [5] * 32, [90] * 4


def test_more_devices_at_once_fewer_after_four_rounds():
    planner = Planner(Scripted([]), REPLICAS)
    assert turn(planner, [EVEN, LONE, EVEN, EVEN, EVEN, EVEN, EVEN]) == [MANY, MANY, FEW, FEW, FEW, FEW, MANY]
    assert planner.metrics() == {"sched/num_rounds": 1.0, "sched/num_layout_changes": 2.0, "sched/tensor": 1.0}


def test_a_round_that_says_otherwise_starts_the_count_again():
    planner = Planner(Scripted([]), REPLICAS)
    assert turn(planner, [LONE, EVEN, EVEN, EVEN, LONE, EVEN, EVEN, EVEN, EVEN, EVEN]) == [MANY] + [FEW] * 8 + [MANY]


def test_a_small_gain_is_no_reason():
    """8.0 against 8.5 s is 1.06: above 1.05, below 1.07; and a relayout has to be paid."""
    for changed, last in (({}, MANY), ({"gain": 1.07}, FEW), ({"move_s": 1.0}, FEW)):
        assert turn(Planner(Scripted([]), REPLICAS, **changed), [LONE, *[EVEN] * 5])[-1] == last


def test_pressure_on_the_kv_asks_for_more_devices():
    """8 answers of 40 tokens a replica need 336 tokens of KV and 100 are there; with two devices 16 need 672 of 300: fewer
    are parked and the steps are no slower."""
    scarce = [40] * 32
    assert turn(Planner(Scripted([]), REPLICAS), [scarce, scarce]) == [MANY, FEW]
    plenty = {
        layout: ReplicaCapacity(slots=way.slots, kv_tokens=10_000, cost=way.cost) for layout, way in REPLICAS.items()
    }
    assert turn(Planner(Scripted([]), plenty), [scarce, scarce]) == [MANY, MANY]


def test_each_kind_of_round_has_its_own_plan():
    now = [""]
    planner = Planner(Scripted([], lambda: now[0]), REPLICAS)
    kinds = ["short"] * 4 + ["long"] + ["short"] * 2 + ["long"] + ["short"]
    lengths = [EVEN if kind == "short" else LONE for kind in kinds]
    assert turn(planner, lengths, kinds, now) == [MANY] * 7 + [
        FEW,
        MANY,
    ]  # the second long round; and back for short ones


def test_a_planner_goes_on_alike():
    rounds = [LONE, EVEN, EVEN, EVEN, EVEN, EVEN, LONE, LONE]
    whole = turn(Planner(Scripted([]), REPLICAS), rounds)
    for cut in range(len(rounds)):
        first, second = Planner(Scripted([]), REPLICAS), Planner(Scripted([]), REPLICAS)
        begun = turn(first, rounds[:cut])
        second.load_state_dict(first.state_dict())
        assert second.state_dict() == first.state_dict()
        assert begun + turn(second, rounds[cut:]) == whole


class Layouts(ring.RacingEngine):
    """A racing engine of as many replicas as its layout has."""

    def __init__(self, **settings):
        super().__init__(**settings)
        self.layouts = []

    def relayout(self, layout):
        if not self.layouts or self.layouts[-1] != layout:
            assert not self.live, "a round has begun"
            self.layouts.append(layout)
        self._replicas = layout.replicas


@pytest.mark.parametrize("policy", ["sync", "tail_batching"])
def test_a_run_that_changes_its_layout_trains_on_the_same(policy):
    """In the loop, with a recorder around it; the log says when it changed."""
    plain = ring.trained(ring.turn(ring.policy(policy), ring.RacingEngine(), 6))
    lines, engine = [], Layouts()
    quick = {
        MANY: REPLICAS[MANY],
        FEW: ReplicaCapacity(slots=16, kv_tokens=300, cost=DecodeCost(weights_s=0.1, token_s=0, row_s=0.0)),
    }
    scheduler = Recorder(Planner(ring.policy(policy, replicas=4), quick), lines.append)
    assert ring.trained(ring.turn(scheduler, engine, 6)) == plain
    assert engine.layouts == [MANY, FEW]
    assert [line for line in lines if '"layout"' in line] == [
        '{"clock":0,"event":"layout","layout":[4,1]}\n',
        lines[next(i for i, line in enumerate(lines) if '"layout":[2,2]' in line)],
    ]
    assert {request.replica for request in engine.submitted} == {0, 1, 2, 3}
    assert str(scheduler).endswith("Layout(replicas=2, tensor=2)")
