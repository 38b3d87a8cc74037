"""Streamed rounds train on the groups of whole rounds, in pieces, and commit once."""

from types import SimpleNamespace
from typing import ClassVar

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from racing_ring import KeepingLearner, RacingEngine, accuracy, names, policy, trained, turn
from toy_ring import ToyLearner, ToyObserver, ToyPrompts, ToyRewards, observed, publish

from jaxrl_post.ring.loop import run
from jaxrl_post.scheduler.rounds.rounds import Streamed, WholeRounds


class Watched:
    """A scheduler that keeps its parts."""

    def __init__(self, scheduler):
        self._scheduler, self.turns = scheduler, []

    def __getattr__(self, name):
        return getattr(self._scheduler, name)

    def take(self):
        parts = self._scheduler.take()
        self.turns += [parts] if parts else []
        return parts


@settings(max_examples=40, deadline=None)
@given(
    seed=st.integers(0, 2**16),
    size=st.integers(1, 6),
    pieces=st.integers(1, 6),
    order=st.integers(0, 99),
    slots=st.integers(1, 20),
    dispatch=st.integers(1, 6),
    name=st.sampled_from(["sync", "tail_batching", "rollpacker"]),
)
def test_the_same_rounds_in_pieces(seed, size, pieces, order, slots, dispatch, name):
    def scheduler(**more):
        return policy(name, ToyPrompts(17, seed), prompts=size, steps=5, **more)

    whole = turn(scheduler(), RacingEngine(order=order, slots=slots, steps=dispatch), 5)
    watched = Watched(scheduler(stream=pieces))
    learner = turn(watched, RacingEngine(order=order, slots=slots, steps=dispatch), 5)
    assert trained(learner) == trained(whole) and learner.step == 5
    per_round, since = [], []
    for (part,) in watched.turns:
        assert part.fresh == part.groups and part.commit == part.publish and part.groups
        since.append(part.groups)
        if part.commit:
            per_round.append(since)
            since = []
    assert not since and len(per_round) == 5
    for got, expected in zip(per_round, whole.parts, strict=True):
        assert sorted(names([g for groups in got for g in groups])) == sorted(names(expected))
        assert all(len(groups) >= min(pieces, size) for groups in got[:-1])  # only the last piece may be small
        order_of = {name: place for place, name in enumerate(names(expected))}
        for groups in got:
            places = [order_of[name] for name in names(groups)]
            assert places == sorted(places)
    streamed = sum(len(groups) for got in per_round for groups in got[:-1])
    assert watched.metrics()["sched/num_groups_streamed"] == streamed


def test_groups_are_learned_while_others_are_generated():
    engine = RacingEngine(steps=1)

    class Looking(KeepingLearner):
        busy: ClassVar[list] = []

        def accumulate(self, groups):
            self.busy.append((len(groups), engine.pending > 0))
            super().accumulate(groups)

    learner = Looking()
    run(
        observed(ToyObserver()),
        engine,
        policy("sync", ToyPrompts(40), steps=3, prompts=12, stream=2),
        ToyRewards(accuracy),
        learner,
        publish,
        3,
    )
    assert sum(count for count, busy in learner.busy if busy) >= 12 and learner.step == 3


def test_an_observer_sees_the_whole_round():
    class Counting(ToyObserver):
        def commit(self, metrics, part):
            assert sorted(names(part.fresh)) == sorted(names(part.groups)) and part.commit and part.publish
            super().commit(metrics, part)

    observe = Counting()
    run(
        observed(observe),
        RacingEngine(),
        policy("sync", steps=3, stream=1),
        ToyRewards(accuracy),
        ToyLearner(),
        publish,
        3,
    )
    assert [seen[2] for seen in observe.seen if seen[0] == "commit"] == [4, 4, 4]


def test_mini_batches_still_divide_with_another_delivery():
    with pytest.raises(ValueError, match="scheduler.mini_batches=3 must divide"):
        policy("sync", mini_batches=3, stream=1)


def test_slices_of_a_whole_round_by_hand():
    """Two mini-batches of four groups, twice: all are fresh once, every slice commits, the last one publishes."""
    kept = [SimpleNamespace(scored_group=number) for number in range(4)]
    assert WholeRounds(2, 2).parts(kept, False, 1) == []
    parts = WholeRounds(2, 2).parts(kept, True, 1)
    assert [part.groups for part in parts] == [(0, 1), (2, 3)] * 2
    assert [part.fresh for part in parts] == [(0, 1, 2, 3), (), (), ()]
    assert all(part.commit for part in parts) and [part.publish for part in parts] == [False] * 3 + [True]


def test_a_stream_hands_over_as_soon_as_a_piece_is_whole():
    one, two = object(), object()
    assert [
        list(Streamed(2).due(whole, over)) for whole, over in (([one], False), ([one, two], False), ([one], True))
    ] == [[], [one, two], [one]]
