"""Rules that pick tokens of a round, against numbers computed by hand and against loops that know no arrays."""

import numpy as np
import pytest

from jaxrl_post.algorithms import token_credit


def made(seed=0, sizes=(5, 1, 8)):
    """Values of some rollouts, and masks that leave tokens out."""
    rng = np.random.default_rng(seed)
    values = [[rng.standard_normal(n) for n in sizes] for _ in range(2)]
    masks = [rng.random(n) < 0.8 for n in sizes]
    masks[1][:] = True
    return (*values, masks)


def places(chosen):
    """(rollout, token) of every chosen token."""
    return {(i, int(t)) for i, one in enumerate(chosen) for t in np.flatnonzero(one)}


def by_covariance(gains, logps, masks):
    """(covariance, place) of every masked token, by loops."""
    at = [(i, t) for i, mask in enumerate(masks) for t in range(len(mask)) if mask[t]]
    mean_gain = sum(gains[i][t] for i, t in at) / len(at)
    mean_logp = sum(logps[i][t] for i, t in at) / len(at)
    return sorted(((gains[i][t] - mean_gain) * (logps[i][t] - mean_logp), (i, t)) for i, t in at)


def test_covariances_by_hand():
    """A = 4, 2, 3 and log pi = -1, -3, -2: the means are 3 and -2, so covariances are 1, 1 and 0."""
    gains, logps, masks = (
        [np.array([4.0, 2.0, 9.0]), np.array([3.0])],
        [np.array([-1.0, -3.0, 5.0]), np.array([-2.0])],
        None,
    )
    masks = [np.array([True, True, False]), np.array([True])]
    got = token_credit.kl_cov(gains, logps, masks, 0.7)
    assert places(got) == {(0, 0), (0, 1)} and [one.size for one in got] == [3, 1]
    assert places(token_credit.clip_cov(gains, logps, masks, 1.0, (0.5, 5.0), 0)) == {(0, 0), (0, 1)}
    assert places(token_credit.clip_cov(gains, logps, masks, 1.0, (1.0, 5.0), 0)) == set()  # bounds are outside


@pytest.mark.parametrize("ratio", [1e-6, 0.3, 1.0])
def test_kl_cov_takes_the_largest_covariances(ratio):
    gains, logps, masks = made()
    ranked = by_covariance(gains, logps, masks)
    count = max(1, int(ratio * len(ranked)))
    assert places(token_credit.kl_cov(gains, logps, masks, ratio)) == {place for _, place in ranked[-count:]}


def test_clip_cov_takes_some_of_those_between_the_bounds():
    gains, logps, masks = made(1, (40, 3, 50))
    ranked = by_covariance(gains, logps, masks)
    candidates = {place for covariance, place in ranked if 0.1 < covariance < 1.5}
    assert places(token_credit.clip_cov(gains, logps, masks, 1.0, (0.1, 1.5), 0)) == candidates
    few = [places(token_credit.clip_cov(gains, logps, masks, 0.05, (0.1, 1.5), seed)) for seed in (0, 0, 1)]
    assert all(one < candidates and len(one) == int(0.05 * len(ranked)) for one in few)
    assert few[0] == few[1] != few[2]


def test_high_entropy_by_hand():
    """Of 1, 2, 3, 4, 5 the upper 0.4 quantile begins at 3.4; a token outside the mask is in no quantile."""
    entropies = [np.array([5.0, 1.0, 99.0]), np.array([3.0, 2.0, 4.0])]
    masks = [np.array([True, True, False]), np.ones(3, bool)]
    assert places(token_credit.high_entropy(entropies, masks, 0.4)) == {(0, 0), (1, 2)}
    assert places(token_credit.high_entropy(entropies, masks, 1.0)) == {(0, 0), (0, 1), (1, 0), (1, 1), (1, 2)}


@pytest.mark.parametrize("bound", [1e-9, 0.04, 0.3, 50.0])
def test_second_moment_drops_the_worst_until_the_mean_fits(bound):
    gaps, _, masks = made(2)
    left = sorted(((gaps[i][t] ** 2, (i, t)) for i, m in enumerate(masks) for t in np.flatnonzero(m)))
    while left and sum(square for square, _ in left) / len(left) > bound:
        left.pop()
    assert places(token_credit.second_moment(gaps, masks, bound)) == {(i, int(t)) for _, (i, t) in left}


def test_a_round_without_tokens_has_none_to_pick():
    nothing = [np.zeros(2)], [np.zeros(2, bool)]
    for got in (
        token_credit.kl_cov(nothing[0], *nothing, 0.5),
        token_credit.clip_cov(nothing[0], *nothing, 0.5, (0.0, 1.0), 0),
        token_credit.high_entropy(*nothing, 0.5),
        token_credit.second_moment(*nothing, 1.0),
    ):
        assert len(got) == 1 and not got[0].any() and got[0].shape == (2,)
    assert token_credit.second_moment([], [], 1.0) == []
