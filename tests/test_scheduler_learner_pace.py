"""A learner apart: how long its steps are by the cost given, and rounds that go on meanwhile."""

from collections import Counter

import numpy as np
import plain_rollouts
import pytest
from racing_ring import names, policy, trained, turn
from test_scheduler_pipeline import Late, PipedEngine
from toy_ring import ToyPrompts
from witness import Restarting

from jaxrl_post.engine import step_cost
from jaxrl_post.ring.types import Group, Prompt, RolloutId
from jaxrl_post.scheduler.forecast import ReplicaCapacity
from jaxrl_post.scheduler.learner_pace import Interleaved, Pace, Split, begins
from jaxrl_post.scheduler.rounds.around import Overlapped


def test_steps_of_a_split_learner_by_hand():
    """Two answers of 3 and 5 tokens to a prompt of 4: 16 trained tokens at 0.5 s and 2 s are 10 s. A step of 6 slots with
    4 + 4/2 tokens of KV each takes 1 + 36 * 0.01 s."""
    prompt = Prompt(id="p", tokens=[1] * 4)
    rollouts = tuple(
        plain_rollouts.rollout(RolloutId(0, "train", 0, "p", i), prompt, [5] * n, clock=(0, 1))
        for i, n in enumerate((3, 5))
    )
    group = Group(prompt=prompt, rollouts=rollouts, rewards=np.zeros(2), scored=np.ones(2, bool))
    engine = ReplicaCapacity(slots=6, kv_tokens=999, cost=step_cost.DecodeCost(weights_s=1.0, token_s=0.01, row_s=0.0))
    work = Split(engine, token_s=0.5, step_s=2.0)
    assert work.steps([group]) == pytest.approx(10 / 1.36)
    assert Pace().steps([group]) == 0
    assert Interleaved(work, ratio=0.5, piece=1).steps([group]) == pytest.approx(5 / 1.36)
    assert [Interleaved(work, ratio=0.5, piece=size).pieces([group] * 3) for size in (1, 16, 24, 500)] == [3, 3, 2, 1]
    assert work.pieces([group] * 3) == Pace().pieces([group] * 3) == 1


class Parts:
    """A scheduler that keeps (clock of the turn, commits, publishes, groups) of every part."""

    def __init__(self, scheduler):
        self._scheduler, self.parts, self._clock = scheduler, [], 0

    def __getattr__(self, name):
        return getattr(self._scheduler, name)

    def admit(self, capacity, clock):
        self._clock = clock
        return self._scheduler.admit(capacity, clock)

    def take(self):
        parts = self._scheduler.take()
        self.parts += [(self._clock, part.commit, part.publish, len(part.groups)) for part in parts]
        return parts


@pytest.mark.parametrize("late", [1, 7, 500])
def test_rounds_overlap_with_the_learner_and_stay_one_step_behind(late):
    """Weights are published at the first turn after they are due, or when the next round needs the learner.

    Never do two steps run. At frozen weights it trains on what rounds without it do."""
    scheduler = Parts(Overlapped(policy("sync", ToyPrompts(40), steps=8), Late(late)))
    learner = turn(scheduler, PipedEngine(slots=6, steps=2), 8)
    kinds = [(commit, publish, groups > 0) for _, commit, publish, groups in scheduler.parts]
    assert kinds == [(False, False, True), (True, True, False)] * 7 + [(True, True, True)]
    begins, ends = ([clock for clock, *_ in scheduler.parts[which::2]] for which in (0, 1))
    for begun, ended, following in zip(begins, ends, begins[1:]):
        assert begun < ended <= following and (ended >= begun + late or ended == following)
    plain = turn(policy("sync", ToyPrompts(40), steps=8), PipedEngine(slots=6, steps=2), 8)
    assert trained(learner) == trained(plain)
    stale = [
        step - int(v)
        for step, groups in enumerate(part for part in learner.parts if part)
        for group in groups
        for r in group.rollouts
        for v in r.versions
    ]
    assert min(stale) >= 0 and max(stale) == 1
    if late == 500:
        assert Counter(stale)[1] > 0.6 * sum(Counter(stale).values())


def test_restarted_at_any_point_it_decides_alike():
    def lines(every):
        kept = []

        def make():
            return Overlapped(policy("tail_batching", ToyPrompts(40), steps=8, prefix_mode="recompute"), Late(5))

        scheduler = Parts(Restarting(make, 3, every))
        learner = turn(scheduler, PipedEngine(slots=6, steps=2, drift=0.05), 8)
        kept += [names(groups) for groups in learner.parts]
        return scheduler.parts, kept, trained(learner)

    assert lines(0) == lines(7)


@pytest.mark.parametrize("clock, until, ended, begun", [(5, 3.5, 5, 3.5), (5, 3.5, 4, 5), (5, 9.0, 5, 5)])
def test_a_step_begins_as_soon_as_the_learner_is_free(clock, until, ended, begun):
    """Its batch was whole before: then where the step before was due, if its weights were published at this very clock."""
    assert begins(clock=clock, until=until, ended=ended) == begun
