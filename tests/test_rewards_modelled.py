"""The score of a reward model in the pool: beside functions or alone, journaled, and found again by a resumed run."""

from __future__ import annotations

import numpy as np
import pytest
from test_rewards_pool import Log, group, joined, pool, rollout
from test_rewards_pool import graders as graders

from jaxrl_post.rewards.modelled import SCORE, Modelled
from jaxrl_post.runs.journal import Journaled


class Model:
    """Scores a text by its sum, and counts its calls and texts."""

    def __init__(self):
        self.calls: list[int] = []

    def __call__(self, texts):
        self.calls.append(len(texts))
        return np.array([float(text.sum()) for text in texts], np.float32)


def test_a_score_is_added_to_the_sum_of_functions(graders):
    model, log = Model(), Log()
    rollouts = [rollout("0.5", 0), rollout("no number", 1), rollout("2", 2)]
    with pool(graders, "number", journal=log, beside=Modelled(model, 0.1, alone=False)) as rewards:
        found = joined(rewards, *rollouts)
    own = [float(one.prompt.tokens.sum() + one.tokens.sum()) for one in rollouts]
    assert found.scored.tolist() == [True, False, True] and model.calls == [3]
    np.testing.assert_allclose(found.rewards[[0, 2]], [0.5 + 0.1 * own[0], 2 + 0.1 * own[2]])
    np.testing.assert_allclose(found.components[SCORE][[0, 2]], [own[0], own[2]])
    np.testing.assert_array_equal(found.components["acc"][[0, 2]], [0.5, 2])
    assert [record.get("model") for record in log] == [own[0], None, own[2]]


def test_a_model_alone_scores_what_waits_together_and_a_resumed_run_asks_it_nothing():
    model, log = Model(), Log()
    first, second = ([rollout(str(n), n, prompt=name) for n in range(2)] for name in "ab")
    with pool("", timeout_s=5.0, journal=log, beside=Modelled(model, 2.0, alone=True)) as rewards:
        for one in (*first, *second):
            rewards.start(one)
        found = [rewards.join(group(*own)) for own in (first, second)]
        assert rewards.metrics()["reward/unscored"] == 0
    want = [[2 * float(1 + one.tokens.sum()) for one in own] for own in (first, second)]
    np.testing.assert_array_equal([one.rewards for one in found], want)
    assert all(one.scored.all() for one in found) and model.calls == [4]
    again, silent = Log(), Model()
    beside = Modelled(silent, 2.0, alone=True)
    with pool("", timeout_s=5.0, journal=again, journaled=Journaled(log), beside=beside) as rewards:
        np.testing.assert_array_equal(joined(rewards, *first).rewards, want[0])
    assert silent.calls == [] and again == log[:2]


def test_a_score_that_is_no_number_leaves_a_rollout_unscored():
    with pool("", timeout_s=5.0, beside=Modelled(lambda texts: np.array([np.nan]), 1.0, alone=True)) as rewards:
        found = joined(rewards, rollout("1"))
        assert not found.scored.any() and rewards.metrics()["reward/unscored"] == 1


def test_without_functions_and_without_a_model_nothing_scores():
    with pytest.raises(ValueError, match="reward.functions is empty"):
        pool("")
