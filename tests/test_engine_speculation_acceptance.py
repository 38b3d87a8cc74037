"""Acceptance rates from counts, by hand."""

from __future__ import annotations

import numpy as np
import pytest

from jaxrl_post.engine.speculation.acceptance import Estimates

PRIORS = np.array([0.25, 0.5], np.float32)


def test_rates_by_hand():
    estimates = Estimates(PRIORS, strength=4, span=10)
    assert estimates.rates().tolist() == [0.25, 0.5]
    estimates.add(np.array([[10, 0], [9, 0]]))
    assert estimates.rates().tolist() == [np.float32(10 / 14), 0.5]
    estimates.add(np.array([[10, 4], [0, 4]]))  # 20 of which the first 10 count half
    assert estimates.rates().tolist() == [np.float32((4.5 + 1) / (15 + 4)), np.float32(6 / 8)]


def test_a_class_that_is_always_right_stays_below_one_and_follows_when_it_is_not():
    estimates = Estimates(PRIORS)
    for _ in range(1000):
        estimates.add(np.array([[100, 100], [100, 0]]))
    high, low = estimates.rates()
    assert 0.99 < high < 1 and 0 < low < 0.01
    for _ in range(100):
        estimates.add(np.array([[100, 0], [0, 0]]))
    assert estimates.rates()[0] < 0.1


def test_restored_estimates_go_on_alike():
    noise = np.random.default_rng(0)
    whole, first, second = (Estimates(PRIORS, span=50) for _ in range(3))
    for number in range(10):
        seen = noise.integers(0, 40, 2)
        counts = np.stack([seen, noise.integers(0, seen + 1)])
        whole.add(counts)
        (first if number < 4 else second).add(counts)
        if number == 3:
            second.load_state_dict(first.state_dict())
    assert np.array_equal(whole.rates(), second.rates())
    with pytest.raises(ValueError, match="the saved counts have 1 classes, this drafter 2"):
        whole.load_state_dict({"counts": np.zeros((2, 1))})


@pytest.mark.parametrize("priors, strength", [([0.0, 0.5], 1.0), ([0.5, 1.0], 1.0), ([0.5, 0.5], 0.0)])
def test_priors_are_chances(priors, strength):
    with pytest.raises(ValueError, match="between 0 and 1"):
        Estimates(np.array(priors, np.float32), strength=strength)
