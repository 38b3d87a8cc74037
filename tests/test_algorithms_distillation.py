"""A teacher in the advantage, by hand."""

import made_groups
import numpy as np
import pytest

from jaxrl_post.algorithms import credit
from jaxrl_post.config import AlgorithmConfig
from jaxrl_post.ring.types import Group, Prompt

PROMPT = Prompt(id="a", tokens=[1])


def group(scored=(True, True)):
    """Rollouts of 2 and 3 tokens. The second token of the second one was observed."""
    rollouts = (
        made_groups.rollout(PROMPT, 0, [3, 4]),
        made_groups.rollout(PROMPT, 1, [5, 6, 7], sampled=np.array([True, False, True])),
    )
    return Group(prompt=PROMPT, rollouts=rollouts, rewards=np.array([1.0, 0.0]), scored=np.array(scored))


def assign(given: AlgorithmConfig, one: Group):
    first, second = (rollout.id for rollout in one.rollouts)
    old = {first: np.array([-1.0, -2.0]), second: np.array([-1.0, -9.0, -3.0])}
    teacher = {first: np.array([-0.5, -4.0]), second: np.array([-1.25, -1.0, -1.0])}
    credits, found = credit.assign([one], given, max_tokens=10, old=old, reference={}, teacher=teacher)
    return [credits[r.id] for r in one.rollouts], credit.describe([found], given)


def test_the_gain_of_a_token_is_its_advantage():
    (first, second), told = assign(AlgorithmConfig(adv_estimator="distill"), group())
    np.testing.assert_array_equal(first.advantages, [0.5, -2.0])
    np.testing.assert_array_equal(second.advantages, [-0.25, 0.0, 2.0])
    # the means of both rollouts: 0.75 and -0.875
    assert told == {"rollout/opd_reverse_kl": pytest.approx((0.75 - 0.875) / 2)}


def test_beside_rewards_it_has_a_weight():
    """RLOO of the rewards 1 and 0 is 1 and -1."""
    (first, second), told = assign(AlgorithmConfig(adv_estimator="rloo", opd_kl_coef=0.5), group())
    np.testing.assert_array_equal(first.advantages, [1.25, 0.0])
    np.testing.assert_array_equal(second.advantages, [-1.125, 0.0, 0.0])
    assert told["rollout/opd_reverse_kl"] == pytest.approx(-0.0625)


def test_an_unscored_rollout_learns_nothing_from_a_teacher():
    (first, second), told = assign(AlgorithmConfig(adv_estimator="distill"), group(scored=(False, True)))
    assert not first.advantages.any() and first.weight == first.count == 0
    assert second.advantages.any() and told["rollout/opd_reverse_kl"] == pytest.approx(-0.875)


def test_without_a_coefficient_there_is_no_teacher():
    (first, _), told = assign(AlgorithmConfig(adv_estimator="rloo"), group())
    np.testing.assert_array_equal(first.advantages, [1.0, 1.0])
    assert told == {}
