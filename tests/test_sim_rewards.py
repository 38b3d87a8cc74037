"""Simulated scores, what is remembered of lengths, and the figures of a run."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import sim_arms as arms

from jaxrl_post.ring.types import Group
from jaxrl_post.simulate import pace
from jaxrl_post.simulate.learner import Lengths, SimLearner, SimRewards
from jaxrl_post.simulate.tally import Round, figures


def groups(count, slots=64):
    engine = arms.engine(slots=slots)
    engine.submit([arms.request(n) for n in range(count)])
    while engine.pending:
        for rollout in engine.step():
            yield Group(prompt=rollout.prompt, rollouts=(rollout,), rewards=np.zeros(1), scored=np.zeros(1, bool))


def test_the_chance_of_being_right_follows_the_length():
    """At `middle` tokens a half; a slope of -1 a factor e above it, 1 / (1 + e)."""
    for slope, share in ((0.0, lambda n: 0.5), (-1.0, lambda n: 1 / (1 + n / 10.0))):
        rewards = SimRewards(slope=slope, middle=10.0)
        scored = [rewards.join(group) for group in groups(1500)]
        expected = np.mean([share(len(group.rollouts[0])) for group in scored])
        assert np.mean([group.rewards[0] for group in scored]) == pytest.approx(expected, abs=0.04)
        assert all(group.scored.all() for group in scored)


def test_lengths_are_remembered_of_the_last_epoch():
    past = Lengths()
    rewards = SimRewards(records=[past])
    scored = [rewards.join(group) for group in groups(5)]
    assert all(past.of(group.prompt.id)[0].lengths.tolist() == [len(group.rollouts[0])] for group in scored)
    assert past.of("99") == ()


def test_the_learner_counts_prompts_and_answers():
    learner, given = SimLearner(token_s=0.5, step_s=3.0), list(groups(3))
    learner.accumulate(given)
    tokens = sum(2 + len(group.rollouts[0]) for group in given)
    assert learner.commit() == {"actor/num_tokens": tokens, "actor/seconds": 3.0 + 0.5 * tokens}
    assert (learner.step, learner.params, learner.seconds) == (1, 1, 3.0 + 0.5 * tokens)
    assert learner.commit()["actor/seconds"] == 3.0
    with pytest.raises(ValueError, match="token_s=-1.0 and step_s=0.0 must be at least 0"):
        SimLearner(token_s=-1.0)


def test_figures_by_hand():
    def one(kind, seconds, lengths):
        return Round(
            kind=kind,
            generate_s=seconds,
            train_s=1.0,
            lent_s=seconds + 0.5,
            lengths=np.array(lengths),
            reward=0.5,
            staleness=2.0,
        )

    found = figures(
        [one("short", 2.0, [1, 3]), one("short", 4.0, [2, 2]), one("long", 9.0, [8, 4])],
        {"sim/num_tokens_generated": 25.0, "sim/num_tokens_reused": 5.0},
    )
    assert (found["rollout_s"], found["step_s"], found["short_rollout_s"], found["long_step_s"]) == (
        5.0,
        6.0,
        3.0,
        10.0,
    )
    assert (found["lent_step_s"], found["long_lent_step_s"]) == (5.5, 9.5)
    assert (found["period"], found["short_longest"], found["long_mean_length"]) == (3.0, 2.5, 6.0)
    assert found["tokens_wasted"] == pytest.approx(0.2) and found["tokens_recomputed"] == pytest.approx(0.2)
    assert found["mean_length"] == pytest.approx(20 / 6)
    twice = figures([one("short", 2.0, [1, 3]), dataclasses.replace(one("long", 9.0, [8, 4]), batches=2)], {})
    assert (twice["rollout_s"], twice["step_s"], twice["long_rollout_s"]) == (11 / 3, 13 / 3, 9.0)  # three batches


def test_lending_by_hand():
    """4 rollouts are done at 1, 2, 3 and 10 s, and all groups together take 4 s on all devices.

    Half of the devices are lent at 1 + 1 s and train a half as fast as all. The group that is whole at 2 s has a quarter of the
    tokens: it takes until 4 s, and the next one until 6 s. The third has half of the tokens and would take until 14 s. So it
    is left to the end, where it takes 2 s on all."""
    groups = [(2.0, 0.25), (3.0, 0.25), (10.0, 0.5)]
    found = pace.step_s([1.0, 2.0, 3.0, 10.0], groups, rollout_s=10.0, train_s=4.0, first=0.25, migrate_s=1.0)
    assert found == 10.0 + 2.0
    assert pace.step_s([1.0, 2.0, 3.0, 10.0], groups, rollout_s=10.0, train_s=4.0, first=1.0) == 14.0
    assert pace.step_s([], groups, rollout_s=10.0, train_s=4.0) == 14.0


def test_only_what_nobody_can_write_to_is_shared():
    """A rollout's arrays are its own copies, unless they are read-only down to their memory."""
    rollout = next(groups(1)).rollouts[0]
    mine = np.arange(len(rollout), dtype=np.int32)
    view = mine[:]
    view.setflags(write=False)
    copied = dataclasses.replace(rollout, versions=np.zeros_like(mine), tokens=view, argmax_tokens=None)
    mine[:] = 7
    assert copied.tokens.tolist() == list(range(len(rollout))) and not copied.tokens.flags.writeable
    mine.setflags(write=False)
    assert dataclasses.replace(rollout, tokens=mine, argmax_tokens=None).tokens is mine
