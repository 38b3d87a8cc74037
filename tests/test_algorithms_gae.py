"""GAE by hand, and against its definition as a sum over all later errors."""

import numpy as np
import pytest

from jaxrl_post.algorithms import gae

REWARDS = np.array([0.0, 9.0, 0.0, 1.0])
VALUES = np.array([0.5, 7.0, 0.25, 0.75], np.float32)
MASK = np.array([True, False, True, True])


def test_a_rollout_with_an_observed_token_by_hand():
    """gamma 0.5, lam 0.5; the second token is observed. From the end: 1 - 0.75 = 0.25; 0 + 0.375 - 0.25 + 0.25 * 0.25
    = 0.1875; 0 + 0.125 - 0.5 + 0.25 * 0.1875 = -0.328125. What stands at the observed token is never read."""
    advantages, returns = gae.of_tokens(np.where(MASK, REWARDS, 0), VALUES, MASK, 0.5, 0.5)
    np.testing.assert_allclose(advantages, [-0.328125, 0, 0.1875, 0.25])
    np.testing.assert_allclose(returns, [0.171875, 0, 0.4375, 1.0])


def test_lambda_one_is_the_return_and_lambda_zero_the_next_value():
    rng = np.random.default_rng(0)
    rewards, values, mask = rng.normal(size=9), rng.normal(size=9), np.ones(9, bool)
    advantages, returns = gae.of_tokens(rewards, values, mask, 1.0, 1.0)
    np.testing.assert_allclose(returns, np.cumsum(rewards[::-1])[::-1])
    np.testing.assert_allclose(advantages, returns - values)
    advantages, _ = gae.of_tokens(rewards, values, mask, 0.9, 0.0)
    np.testing.assert_allclose(advantages, rewards + 0.9 * np.append(values[1:], 0) - values)


@pytest.mark.parametrize("gamma, lam", [(1.0, 1.0), (0.9, 0.95), (1.0, 0.0)])
def test_against_the_definition(gamma, lam):
    rng = np.random.default_rng(1)
    rewards, values, mask = rng.normal(size=30), rng.normal(size=30), rng.random(30) < 0.7
    at = np.flatnonzero(mask)
    v = values[at]
    delta = rewards[at] + gamma * np.append(v[1:], 0.0) - v
    want = [sum((gamma * lam) ** k * d for k, d in enumerate(delta[t:])) for t in range(at.size)]
    advantages, returns = gae.of_tokens(rewards, values, mask, gamma, lam)
    np.testing.assert_allclose(advantages[at], want, atol=1e-12)
    np.testing.assert_allclose(returns[at], want + v, atol=1e-12)
    assert not advantages[~mask].any() and not returns[~mask].any()


def test_turns_by_hand():
    """Two turns, of one and of two tokens: values 0.5 and 0.25, rewards 0 and 1. 1 - 0.25 = 0.75;
    0 + 0.5 * 0.25 - 0.5 + 0.25 * 0.75 = -0.1875."""
    advantages, returns = gae.of_turns(np.where(MASK, REWARDS, 0), VALUES, MASK, 0.5, 0.5)
    np.testing.assert_allclose(advantages, [-0.1875, 0, 0.75, 0.75])
    np.testing.assert_allclose(returns, [0.3125, 0, 1.0, 1.0])


def test_one_turn_is_reward_minus_first_value_whatever_lambda():
    rng = np.random.default_rng(2)
    rewards, values = rng.normal(size=6), rng.normal(size=6)
    advantages, returns = gae.of_turns(rewards, values, np.ones(6, bool), 0.9, 0.3)
    np.testing.assert_allclose(advantages, np.full(6, rewards.sum() - values[0]))
    np.testing.assert_allclose(returns, np.full(6, rewards.sum()))


def test_nothing_sampled_gets_nothing():
    for level in gae.LEVELS.values():
        for found in level(np.zeros(3), np.ones(3), np.zeros(3, bool), 1.0, 1.0):
            np.testing.assert_array_equal(found, np.zeros(3))


def test_advantages_are_whitened_over_the_round_and_returns_are_not():
    ones = np.ones(2, bool)
    given = ([np.array([0, 1.0]), np.array([0, 3.0])], [np.zeros(2), np.zeros(2)], [ones, ones])
    advantages, returns = gae.estimate("gae", *given, 1.0, 1.0)
    values = np.array([1.0, 1, 3, 3])
    np.testing.assert_allclose(np.concatenate(returns), values)
    np.testing.assert_allclose(np.concatenate(advantages), (values - 2) / np.sqrt(4 / 3 + 1e-8))


def test_explained_variance_by_hand():
    returns = np.array([0.0, 1.0, 2.0])
    assert gae.explained_variance(returns, returns) == 1.0
    assert gae.explained_variance(np.zeros(3), returns) == pytest.approx(1 - 1 / 1.00001)
    assert gae.explained_variance(returns / 2, returns) == pytest.approx(1 - 0.25 / 1.00001)
    assert gae.explained_variance(np.ones(1), np.ones(1)) == 0.0


def test_lambda_of_the_returns_may_be_another():
    ones = np.ones(3, bool)
    given = ([np.array([0, 0, 1.0])], [np.array([0.5, 0.25, 0.75])], [ones])
    for lam, lam_value in ((0.3, 1.0), (0.9, 0.0)):
        advantages, returns = gae.estimate("gae", *given, 1.0, lam, lam_value=lam_value)
        np.testing.assert_array_equal(advantages, gae.estimate("gae", *given, 1.0, lam)[0])
        np.testing.assert_array_equal(returns, gae.estimate("gae", *given, 1.0, lam_value)[1])


def test_lambda_grows_with_the_length():
    """alpha 0.5: four tokens have 1 - 1 / 2, two tokens 0. A rollout of two turns has 0 too, however many tokens."""
    assert gae.adaptive(0.5, 4) == 0.5 and gae.adaptive(0.5, 2) == 0.0 == gae.adaptive(0.05, 1)
    rng = np.random.default_rng(3)
    rewards, values = ([rng.normal(size=n) for n in (4, 2)] for _ in range(2))
    masks = [np.ones(4, bool), np.ones(2, bool)]
    found, returns = gae.estimate("gae", rewards, values, masks, 1.0, 0.8, alpha=0.5)
    parts = [gae.of_tokens(r, v, m, 1.0, lam)[0] for r, v, m, lam in zip(rewards, values, masks, (0.5, 0.0))]
    for got, want in zip(found, gae.whiten(parts, masks), strict=True):
        np.testing.assert_allclose(got, want)
    for got, want in zip(returns, gae.estimate("gae", rewards, values, masks, 1.0, 0.8)[1], strict=True):
        np.testing.assert_array_equal(got, want)
    assert gae.ACTIONS["gae_turn"](MASK) == 2 and gae.ACTIONS["gae"](MASK) == 3
