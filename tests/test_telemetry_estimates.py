"""pass@k against numbers found by listing all sets, and bootstrap intervals against what they must cover."""

import itertools
import statistics

import numpy as np
import pytest

from jaxrl_post.telemetry import estimates


@pytest.mark.parametrize(
    "n, right, k, expected", [(4, 1, 1, 0.25), (4, 1, 2, 0.5), (4, 2, 2, 5 / 6), (5, 2, 3, 0.9), (4, 0, 4, 0.0)]
)
def test_pass_at_k_is_what_was_computed_by_hand(n, right, k, expected):
    assert estimates.pass_at(n, right, k) == pytest.approx(expected)


@pytest.mark.parametrize("n", range(1, 7))
def test_pass_at_k_is_the_share_of_sets_with_a_right_rollout(n):
    for right, k in itertools.product(range(n + 1), range(1, n + 1)):
        sets = [any(i < right for i in chosen) for chosen in itertools.combinations(range(n), k)]
        assert estimates.pass_at(n, right, k) == pytest.approx(statistics.mean(sets))


@pytest.mark.parametrize("n, right, k, words", [(4, 1, 5, "k=5"), (4, 1, 0, "k=0"), (4, 5, 1, "5 of 4")])
def test_impossible_counts_are_refused(n, right, k, words):
    with pytest.raises(ValueError, match=words):
        estimates.pass_at(n, right, k)


def test_the_interval_covers_the_mean_in_about_its_share_of_samples(monkeypatch):
    monkeypatch.setattr(estimates, "DRAWS", 400)
    random, covered = np.random.default_rng(1), []
    for _ in range(300):
        low, high = estimates.mean_interval(random.normal(2.0, 1.0, 60))
        covered.append(low <= 2.0 <= high)
    assert 0.9 <= statistics.mean(covered) <= 0.98


def test_an_interval_is_the_same_each_time_and_of_equal_values_a_point():
    assert estimates.mean_interval([1.0, 2.0, 5.0]) == estimates.mean_interval([1.0, 2.0, 5.0])
    assert estimates.mean_interval([0.5] * 7) == (0.5, 0.5)


@pytest.mark.parametrize("values, share", [([], 0.9), ([1.0, float("nan")], 0.9), ([1.0], 1.0)])
def test_what_has_no_interval_is_refused(values, share):
    with pytest.raises(ValueError):
        estimates.mean_interval(values, share=share)
