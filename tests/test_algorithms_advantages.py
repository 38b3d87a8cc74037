"""Advantages against numbers computed by hand."""

import numpy as np
import pytest

from jaxrl_post.algorithms import advantages

REWARDS = np.array([1, 0, 0, 1, 1], np.float32)
ALL = np.ones(5, bool)
SOME = np.array([True, True, False, True, True])


def test_grpo_by_hand():
    # mean 0.6; squares of deviations sum to 3 * 0.16 + 2 * 0.36 = 1.2; std with n - 1 = sqrt(0.3)
    std = 0.5477225575051661 + 1e-6
    expected = [0.4 / std, -0.6 / std, -0.6 / std, 0.4 / std, 0.4 / std]
    np.testing.assert_allclose(advantages.grpo(REWARDS, ALL), expected, rtol=1e-12)


def test_grpo_leaves_unscored_out_of_mean_and_std():
    # scored: 1 0 1 1, mean 0.75, std sqrt((3 * 0.0625 + 0.5625) / 3) = 0.5
    expected = [0.25 / 0.500001, -0.75 / 0.500001, 0, 0.25 / 0.500001, 0.25 / 0.500001]
    np.testing.assert_allclose(advantages.grpo(REWARDS, SOME), expected, rtol=1e-12)


def test_dr_grpo_by_hand():
    np.testing.assert_allclose(advantages.dr_grpo(REWARDS, ALL), [0.4, -0.6, -0.6, 0.4, 0.4], rtol=1e-12)
    np.testing.assert_allclose(advantages.dr_grpo(REWARDS, SOME), [0.25, -0.75, 0, 0.25, 0.25], rtol=1e-12)


def test_rloo_is_reward_minus_mean_of_the_others():
    rng = np.random.default_rng(0)
    rewards = rng.random(6).astype(np.float32)
    scored = np.array([True, True, False, True, True, True])
    kept = np.flatnonzero(scored)
    expected = np.zeros(6)
    for i in kept:
        expected[i] = float(rewards[i]) - np.mean([float(rewards[j]) for j in kept if j != i])
    np.testing.assert_allclose(advantages.rloo(rewards, scored), expected, rtol=1e-12, atol=1e-15)


def test_ones_ignores_rewards():
    np.testing.assert_array_equal(advantages.ones(REWARDS, SOME), [1, 1, 0, 1, 1])


@pytest.mark.parametrize("name", ["grpo", "dr_grpo", "rloo"])
def test_nothing_to_compare_gives_zero(name):
    estimate = advantages.ADVANTAGES[name]
    np.testing.assert_array_equal(estimate(np.float32([3.0]), np.array([True])), [0])
    np.testing.assert_array_equal(estimate(np.float32([3, 5]), np.array([True, False])), [0, 0])
    np.testing.assert_array_equal(estimate(np.float32([3, 5]), np.zeros(2, bool)), [0, 0])
    np.testing.assert_array_equal(estimate(np.float32([1, 1, 1]), np.ones(3, bool)), [0, 0, 0])


@pytest.mark.parametrize("name", list(advantages.ADVANTAGES))
def test_an_unscored_reward_may_be_anything_and_a_scored_one_must_be_finite(name):
    estimate = advantages.ADVANTAGES[name]
    with_nan = estimate(np.float32([1, np.nan, 0]), np.array([True, False, True]))
    np.testing.assert_array_equal(with_nan, estimate(np.float32([1, 7, 0]), np.array([True, False, True])))
    with pytest.raises(ValueError, match="must be finite, got .*nan"):
        estimate(np.float32([1, np.nan, 0]), np.ones(3, bool))


def test_names_are_those_of_the_config():
    import dataclasses

    from jaxrl_post.config import Algorithm
    choices = {f.name: f.metadata["choices"] for f in dataclasses.fields(Algorithm) if "choices" in f.metadata}
    assert set(choices["adv_estimator"]) == set(advantages.ADVANTAGES)
