"""Advantages against numbers computed by hand."""

import numpy as np
import pytest
from refusals import refused

from jaxrl_post.algorithms import advantages, credit

REWARDS = np.array([1, 0, 0, 1, 1], np.float32)
ALL = np.ones(5, bool)
SOME = np.array([True, True, False, True, True])
LENGTHS = np.array([2, 4, 9, 1, 3])


def test_grpo_by_hand():
    # mean 0.6; squares of deviations sum to 3 * 0.16 + 2 * 0.36 = 1.2; std with n - 1 = sqrt(0.3)
    std = 0.5477225575051661 + 1e-6
    expected = [0.4 / std, -0.6 / std, -0.6 / std, 0.4 / std, 0.4 / std]
    np.testing.assert_allclose(advantages.grpo(REWARDS, ALL, LENGTHS), expected, rtol=1e-12)


def test_grpo_leaves_unscored_out_of_mean_and_std():
    # scored: 1 0 1 1, mean 0.75, std sqrt((3 * 0.0625 + 0.5625) / 3) = 0.5
    expected = [0.25 / 0.500001, -0.75 / 0.500001, 0, 0.25 / 0.500001, 0.25 / 0.500001]
    np.testing.assert_allclose(advantages.grpo(REWARDS, SOME, LENGTHS), expected, rtol=1e-12)


def test_dr_grpo_by_hand():
    np.testing.assert_allclose(advantages.dr_grpo(REWARDS, ALL, LENGTHS), [0.4, -0.6, -0.6, 0.4, 0.4], rtol=1e-12)
    np.testing.assert_allclose(advantages.dr_grpo(REWARDS, SOME, LENGTHS), [0.25, -0.75, 0, 0.25, 0.25], rtol=1e-12)


def test_rloo_is_reward_minus_mean_of_the_others():
    rng = np.random.default_rng(0)
    rewards = rng.random(6).astype(np.float32)
    scored = np.array([True, True, False, True, True, True])
    kept = np.flatnonzero(scored)
    expected = np.zeros(6)
    for i in kept:
        expected[i] = float(rewards[i]) - np.mean([float(rewards[j]) for j in kept if j != i])
    np.testing.assert_allclose(advantages.rloo(rewards, scored, np.ones(6, int)), expected, rtol=1e-12, atol=1e-15)


def test_opo_by_hand():
    # sum(T R) / sum(T) = (2 + 1 + 3) / 19 over all; without the third (2 + 1 + 3) / 10
    np.testing.assert_allclose(advantages.opo(REWARDS, ALL, LENGTHS), [13 / 19, -6 / 19, -6 / 19, 13 / 19, 13 / 19])
    np.testing.assert_allclose(advantages.opo(REWARDS, SOME, LENGTHS), [0.4, -0.6, 0, 0.4, 0.4])
    same = np.full(5, 7)
    np.testing.assert_allclose(advantages.opo(REWARDS, SOME, same), advantages.dr_grpo(REWARDS, SOME, same))


def test_maxrl_by_hand():
    high, low = 0.4 / 0.600001, -0.6 / 0.600001
    np.testing.assert_allclose(advantages.maxrl(REWARDS, ALL, LENGTHS), [high, low, low, high, high])
    np.testing.assert_array_equal(advantages.maxrl(np.zeros(5, np.float32), ALL, LENGTHS), np.zeros(5))  # no success
    with pytest.raises(ValueError, match="needs rewards of at least 0, got -1.0"):
        advantages.maxrl(np.float32([1, -1]), np.ones(2, bool), np.ones(2, int))


def test_grpo_passk_by_hand():
    """Best 3, second 2, std of 1, 2, 3 is 1; with equal best ones nobody has an advantage."""
    three, all3 = np.float32([2, 3, 1]), np.ones(3, bool)
    np.testing.assert_allclose(advantages.grpo_passk(three, all3, LENGTHS[:3]), [0, 1 / 1.000001, 0])
    got = advantages.grpo_passk(three, np.array([True, False, True]), LENGTHS[:3])
    np.testing.assert_allclose(got, [1 / (np.sqrt(0.5) + 1e-6), 0, 0])
    np.testing.assert_array_equal(advantages.grpo_passk(REWARDS, ALL, LENGTHS), np.zeros(5))


def test_lite_ppo_and_gpg_by_hand():
    """Rewards 0 and 1, and 3 and 3 with one of them unscored: means 0.5 and 3; std of 0, 1, 3; 2 of 3 are not 0."""
    rewards = [np.array([0.0]), np.array([0.25, 0.75]), np.array([3.0]), np.array([9.0])]
    masks = [np.ones(1, bool), np.ones(2, bool), np.ones(1, bool), np.zeros(1, bool)]
    groups = np.array([0, 0, 1, 1])
    std = np.sqrt(7 / 3) + 1e-6  # mean 4/3
    got = advantages.lite_ppo(rewards, masks, groups, 1.0)
    for one, want in zip(got, ([-0.5 / std], [0.5 / std] * 2, [0.0], [0.0]), strict=True):
        np.testing.assert_allclose(one, want)
    got = advantages.gpg(rewards, masks, groups, 1.0)
    for one, want in zip(got, ([-0.75], [0.75] * 2, [0.0], [0.0]), strict=True):
        np.testing.assert_allclose(one, want)


def test_remax_is_the_return_minus_the_greedy_reward():
    """Rewards of a KL in the reward and of an end: returns 0.9, 1.0; the unscored rollout gets nothing."""
    rewards = [np.array([-0.1, 7.0, 1.0]), np.array([0.25]), np.array([5.0])]
    masks = [np.array([True, False, True]), np.array([True]), np.array([False])]
    got = advantages.remax(rewards, masks, 0.75)
    for one, want in zip(got, ([0.15, 0.0, 0.25], [-0.5], [0.0]), strict=True):
        np.testing.assert_allclose(one, want, atol=1e-12)


ROUND = [np.array([0.0, 1.0, 2.0]), np.array([4.0]), np.array([9.0, 9.0])]  # per token; the last rollout is unscored
MASKS = [np.array([True, False, True]), np.array([True]), np.array([False, False])]


def test_reinforce_plus_plus_by_hand():
    """Returns at gamma 1/2: the observed token in the middle hands 2 on, so 0 + 1/2 * 2 = 1; then 2, and 4."""
    returns = np.array([1.0, 2.0, 4.0])  # mean 7/3, variance with n-1: (16/9 + 1/9 + 25/9) / 2 = 7/3
    white = (returns - 7 / 3) / np.sqrt(7 / 3 + 1e-8)
    got = advantages.reinforce_plus_plus(ROUND, MASKS, np.array([0, 0, 1]), 0.5)
    for value, expected in zip(got, ([white[0], 0, white[1]], [white[2]], [0, 0]), strict=True):
        np.testing.assert_allclose(value, expected, rtol=1e-12)


def test_reinforce_plus_plus_baseline_by_hand():
    """Sums 2 and 4 of one group, 3 and 1 of another: centred -1, 1, 1, -1; the first answer has two tokens."""
    rewards = [np.array([0.0, 7.0, 2.0]), np.array([4.0]), np.array([3.0]), np.array([1.0]), np.array([np.nan])]
    masks = [np.array([True, False, True]), *[np.array([True])] * 3, np.array([False])]
    tokens = np.array([-1.0, -1, 1, 1, -1])  # mean -0.2, variance (3 * 0.64 + 2 * 1.44) / 4 = 1.2
    white = (tokens + 0.2) / np.sqrt(1.2 + 1e-8)
    got = advantages.reinforce_plus_plus_baseline(rewards, masks, np.array([0, 0, 1, 1, 1]), 0.5)
    for value, expected in zip(got, ([white[0], 0, white[1]], [white[2]], [white[3]], [white[4]], [0]), strict=True):
        np.testing.assert_allclose(value, expected, rtol=1e-12)


@pytest.mark.parametrize("name", list(advantages.WHOLE_ROUND))
def test_whitened_advantages_have_mean_zero_and_variance_one_and_few_tokens_give_zero(name):
    estimate, rng = advantages.WHOLE_ROUND[name], np.random.default_rng(0)
    rewards = [rng.normal(size=n) for n in rng.integers(1, 9, 12)]
    masks = [rng.random(r.size) < 0.8 for r in rewards]
    got = estimate(rewards, masks, np.repeat(np.arange(4), 3), 0.9)
    seen = np.concatenate([value[mask] for value, mask in zip(got, masks, strict=True)])
    if name.startswith("reinforce"):
        assert abs(seen.mean()) < 1e-12 and seen.var(ddof=1) == pytest.approx(1, abs=1e-6)
    for masked in ([np.array([True])], [np.array([False])]):
        np.testing.assert_array_equal(estimate([np.array([3.0])], masked, np.array([0]), 1.0)[0], [0.0])
    refused("must be finite, got .*inf", estimate, [np.array([1.0, np.inf])], [np.ones(2, bool)], np.array([0]), 1.0)


def test_ones_ignores_rewards():
    np.testing.assert_array_equal(advantages.ones(REWARDS, SOME, LENGTHS), [1, 1, 0, 1, 1])


@pytest.mark.parametrize("name", ["grpo", "dr_grpo", "rloo", "opo", "maxrl"])
def test_nothing_to_compare_gives_zero(name):
    estimate = advantages.ADVANTAGES[name]
    np.testing.assert_array_equal(estimate(np.float32([3.0]), np.array([True]), np.array([2])), [0])
    np.testing.assert_array_equal(estimate(np.float32([3, 5]), np.array([True, False]), np.array([2, 3])), [0, 0])
    np.testing.assert_array_equal(estimate(np.float32([3, 5]), np.zeros(2, bool), np.array([2, 3])), [0, 0])
    np.testing.assert_array_equal(estimate(np.float32([1, 1, 1]), np.ones(3, bool), np.array([2, 3, 4])), [0, 0, 0])


@pytest.mark.parametrize("name", list(advantages.ADVANTAGES))
def test_an_unscored_reward_may_be_anything_and_a_scored_one_must_be_finite(name):
    estimate = advantages.ADVANTAGES[name]
    scored, lengths = np.array([True, False, True]), np.array([2, 3, 4])
    with_nan = estimate(np.float32([1, np.nan, 0]), scored, lengths)
    np.testing.assert_array_equal(with_nan, estimate(np.float32([1, 7, 0]), scored, lengths))
    refused("must be finite, got .*nan", estimate, np.float32([1, np.nan, 0]), np.ones(3, bool), lengths)


def test_gdpo_by_hand():
    """Components 0, 1 and 1, 3: z is -+1/sqrt(2) by each. Weights 1 and 0.5; tokens 1 and 2: 3 values to whiten."""
    masks = [np.ones(1, bool), np.ones(2, bool)]
    got = advantages.gdpo([np.array([[0.0, 1.0], [1.0, 3.0]])], [np.ones(2, bool)], masks, np.array([1.0, 0.5]))
    one, two = 0.5 / (0.5**0.5 + 1e-6), 1.0 / (2**0.5 + 1e-6)
    high = one + 0.5 * two
    mean, variance = high / 3, np.var([-high, high, high], ddof=1)
    want = [(x - mean) / np.sqrt(variance + 1e-8) for x in (-high, high)]
    np.testing.assert_allclose(got[0], want[:1], rtol=1e-12)
    np.testing.assert_allclose(got[1], want[1:] * 2, rtol=1e-12)


def test_gdpo_of_one_component_is_whitened_grpo():
    rewards, masks = REWARDS.astype(float), [np.ones(n, bool) for n in LENGTHS]
    got = advantages.gdpo([rewards[None]], [ALL], masks, np.ones(1))
    plain = advantages.grpo(REWARDS, ALL, LENGTHS)
    want = advantages.whiten([np.full(n, value) for n, value in zip(LENGTHS, plain)], masks)
    for a, b in zip(got, want, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-12)


def test_optimal_token_baseline_by_hand():
    """Norms 1, 1 and 3: W is 1, 2 against 3. b_1 = (1 * 1 + 0 * 3) / 4, and the second token is alone."""
    rewards, masks = [np.array([0.0, 1.0]), np.array([0.0])], [np.ones(2, bool), np.ones(1, bool)]
    got = advantages.optimal_token_baseline(rewards, masks, [np.array([1.0, 1.0]), np.array([3.0])])
    np.testing.assert_allclose(got[0], [0.75, 0.0], atol=1e-7)
    np.testing.assert_allclose(got[1], [-0.25], atol=1e-7)


def test_observed_tokens_shift_no_token_against_its_group():
    """The second sampled token of the first rollout stands third, and is compared with the second of the other."""
    mask = np.array([True, False, True])
    rewards, masks = [np.array([0.0, 0.0, 1.0]), np.array([0.0, 0.0])], [mask, np.ones(2, bool)]
    got = advantages.optimal_token_baseline(rewards, masks, [np.array([1.0, 99.0, 1.0]), np.array([1.0, 3.0])])
    np.testing.assert_allclose(got[0], [0.5, 0.0, 1 - 2 / 6], atol=1e-7)
    np.testing.assert_allclose(got[1], [-0.5, -2 / 6], atol=1e-7)
    alone = advantages.optimal_token_baseline(rewards, [mask, np.zeros(2, bool)], [np.ones(3), np.ones(2)])
    assert not any(one.any() for one in alone)


def test_the_optimal_baseline_has_the_least_variance():
    """Of all constant baselines of a bandit with two arms, the one by squared norms has the smallest second moment."""
    p, gains = np.array([0.2, 0.8]), np.array([1.0, 0.0])
    norms = 1 - 2 * p + p @ p
    best = (p * norms) @ gains / (p @ norms)
    moments = [(p * norms) @ (gains - b) ** 2 for b in (best - 0.05, best, best + 0.05, p @ gains)]
    assert moments[1] == min(moments)
    arms = np.repeat([0, 1], [200, 800])
    masks = [np.ones(1, bool)] * arms.size
    got = advantages.optimal_token_baseline([gains[[a]] for a in arms], masks, [norms[[a]] for a in arms])
    np.testing.assert_allclose([got[0][0], got[-1][0]], [1 - best, -best], atol=1e-6)


def test_names_are_those_of_the_config():
    import dataclasses

    from jaxrl_post.config import AlgorithmConfig

    choices = {f.name: f.metadata["choices"] for f in dataclasses.fields(AlgorithmConfig) if "choices" in f.metadata}
    others = {"remax", "rae", "optimal_token_baseline", "pairs"}
    assert set(choices["adv_estimator"]) == set(advantages.ADVANTAGES) | credit.WHOLE_ROUND | others
