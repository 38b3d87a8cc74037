"""The ring turned by toys: order of calls, determinism, dynamic sampling, and standing still."""

import dataclasses

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from toy_ring import ToyEngine, ToyLearner, ToyObserver, ToyPrompts, ToyRewards, observed, publish, scheduler_of

from jaxrl_post.ring.events import Ring
from jaxrl_post.ring.loop import run
from jaxrl_post.scheduler.rounds.rounds import Sync


def accuracy(rollout):
    return float(np.random.default_rng(int(rollout.tokens.sum()) + len(rollout)).random() < 0.5)


def rounds(kind=Sync, **changed):
    given = dict(run_seed=1, max_tokens=6, prompts=3, group_size=4, max_waves=1)
    return scheduler_of(kind, ToyPrompts(10), **given | changed)


def turn(*, order=0, slots=8, steps=3, filter_groups=True):
    engine, learner, observe = ToyEngine(order=order, slots=slots), ToyLearner(), ToyObserver()
    scheduler = rounds(steps=steps, filter_groups=filter_groups, max_waves=99, filter_metric="acc")
    rewards = ToyRewards(accuracy)
    run(observed(observe), engine, scheduler, rewards, learner, publish, steps)
    return engine, learner, observe, rewards


def test_the_order_of_a_round():
    engine, learner, observe, rewards = turn(filter_groups=False)
    assert learner.calls == [("prepare", 3), ("accumulate", 3), ("commit",)] * 3
    assert [s[:1] + s[2:] if s[0] == "commit" else s for s in observe.seen] == [
        ("commit", 3),
        ("published", 1),
        ("commit", 3),
        ("published", 2),
        ("commit", 3),
        ("published", 3),
    ]
    work = [call for call in engine.calls if call != ("step",) and call != ("submit", 0)]
    assert work == [("submit", 12), ("swap", 1), ("submit", 12), ("swap", 2), ("submit", 12), ("swap", 3)]
    assert len(rewards.started) == len(set(rewards.started)) == 36


def test_a_round_sees_only_the_weights_published_before_it():
    class Watching(ToyLearner):
        def prepare(self, groups):
            assert {int(v) for g in groups for r in g.rollouts for v in r.versions} == {self.step}
            super().prepare(groups)

    engine, learner = ToyEngine(), Watching()
    scheduler = rounds(steps=4, prompts=2, group_size=3)
    run(observed(ToyObserver()), engine, scheduler, ToyRewards(accuracy), learner, publish, 4)
    assert learner.step == engine.version == 4


def several(mini_batches, ppo_epochs, kind=Sync, steps=8):
    engine, learner, observe = ToyEngine(), ToyLearner(), ToyObserver()
    own = dict(prompts=4, group_size=2, mini_batches=mini_batches, ppo_epochs=ppo_epochs)
    scheduler = rounds(kind, steps=steps // (mini_batches * ppo_epochs), **own)
    run(observed(observe), engine, scheduler, ToyRewards(accuracy), learner, publish, steps)
    return engine, learner, observe


def test_a_round_of_several_steps_is_prepared_and_published_once():
    engine, learner, observe = several(2, 2)
    step = [("accumulate", 2), ("commit",)]
    assert learner.calls == [("prepare", 4), *step, *[("prepare", 0), *step] * 3] * 2
    assert [call for call in engine.calls if call[0] == "swap"] == [("swap", 4), ("swap", 8)]
    assert [seen[1] for seen in observe.seen if seen[0] == "published"] == [4, 8]
    first, second, *again = learner.batches[:4]
    assert again == [first, second] and first != second  # the second epoch


def test_mini_batches_cut_the_round_in_order():
    whole, cut = several(1, 1, steps=2)[1], several(4, 1)[1]
    assert whole.batches[0] == [group for step in cut.batches[:4] for group in step]


def test_a_turn_that_commits_and_does_not_publish_is_refused():
    class Silent(Sync):
        def take(self):
            return [dataclasses.replace(part, publish=False) for part in super().take()]

    with pytest.raises(AssertionError, match="a step is committed and its weights are not published"):
        several(2, 1, Silent)


@settings(max_examples=20, deadline=None)
@given(order=st.integers(0, 2**16), slots=st.integers(1, 20))
def test_completion_order_and_slots_never_change_what_is_learned(order, slots):
    assert turn(order=order, slots=slots)[1].batches == turn()[1].batches
    assert turn(order=order, slots=slots)[1].params == turn()[1].params


def test_nothing_goes_on_after_the_last_step():
    engine, learner, _, _ = turn()
    calls = len(engine.calls)
    run(Ring(), engine, None, None, learner, publish, 3)
    assert len(engine.calls) == calls


def test_standing_still_is_an_error():
    scheduler = rounds(steps=2)
    with pytest.raises(
        RuntimeError,
        match="stands still at learner step 0 of 2.*12 requests pending.*sync round 1 of "
        "2, wave 1: 0 of 3 groups kept, 3 open with 12 rollouts missing",
    ):
        run(Ring(), ToyEngine(stuck=True), scheduler, ToyRewards(accuracy), ToyLearner(), publish, 2)


def test_a_scheduler_with_fewer_rounds_than_steps_is_an_error():
    scheduler = rounds(steps=1)
    with pytest.raises(RuntimeError, match="stands still at learner step 1 of 2.*0 requests pending"):
        run(Ring(), ToyEngine(), scheduler, ToyRewards(accuracy), ToyLearner(), publish, 2)
