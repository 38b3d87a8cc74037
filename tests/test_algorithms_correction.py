"""Importance weights and rejection by hand. Ratios rho = pi_old / mu are powers of two."""

import dataclasses

import numpy as np
import pytest

from jaxrl_post.algorithms import correction
from jaxrl_post.config import AlgorithmConfig

RATIOS = np.array([0.25, 1.0, 2.0, 8.0])
GAP = np.log(RATIOS)  # its sum is log 4


VERSIONS = np.array([3, 3, 5, 6])


def test_importance_by_hand():
    np.testing.assert_allclose(correction.importance(GAP, "none", VERSIONS), np.ones(4))
    np.testing.assert_allclose(correction.importance(GAP, "token", VERSIONS), RATIOS)
    np.testing.assert_allclose(correction.importance(GAP, "sequence", VERSIONS), [4.0] * 4)
    np.testing.assert_allclose(
        correction.importance(np.array([30.0, -50.0]), "token", VERSIONS[:2]), np.exp([20.0, -20.0])
    )
    np.testing.assert_allclose(
        correction.importance(np.array([15.0, 15.0]), "sequence", VERSIONS[:2]), np.exp([20.0, 20.0])
    )


def test_spans_by_hand():
    """Of the same weights: 0.25 * 1, then 2 and 8 alone."""
    np.testing.assert_allclose(correction.importance(GAP, "span", VERSIONS), [0.25, 0.25, 2.0, 8.0])
    np.testing.assert_allclose(correction.importance(GAP, "span", VERSIONS * 0), [4.0] * 4)
    assert correction.importance(np.zeros(0), "span", np.zeros(0, int)).shape == (0,)


def test_how_far_the_proximal_policy_is_expected_to_lie():
    np.testing.assert_allclose(correction.prox_weights(np.array([7, 6, 5, 3]), 7), [1.0, 0.0, 0.5, 0.75])


def test_bounds_by_hand():
    np.testing.assert_array_equal(correction.bounded(RATIOS, (2.0,)), [0.25, 1, 2, 2])  # truncated
    np.testing.assert_array_equal(correction.bounded(RATIOS, (0.5, 2.0)), [0, 1, 2, 0])  # masked


@pytest.mark.parametrize(
    "mode, threshold, expected",
    [
        ("none", (1e-9,), [1, 1, 1, 1]),
        ("token_k1", (2.0,), [0, 1, 1, 0]),  # mu / pi_old in [1/2, 2]: 4, 1, 1/2, 1/8
        ("token_k1", (0.125, 3.0), [0, 1, 1, 1]),
        ("token_k1", (0.25, 4.0), [1, 1, 1, 0]),
        ("token_k2", (0.5,), [0, 1, 1, 0]),  # log(2)^2 / 2 = 0.24, log(4)^2 / 2 = 0.96, log(8)^2 / 2 = 2.2
        ("token_k3", (0.7,), [1, 1, 1, 0]),  # 0.25 - 1 + 1.386 = 0.636; 2 - 1 - 0.693 = 0.307; 8 - 1 - 2.08 = 4.9
        ("seq_sum_k1", (4.1,), [1, 1, 1, 1]),  # the product is 4
        ("seq_sum_k1", (3.9,), [0, 0, 0, 0]),
        ("seq_mean_k1", (1.5,), [1, 1, 1, 1]),  # its fourth root 1.414
        ("seq_mean_k1", (1.4,), [0, 0, 0, 0]),
        ("seq_sum_k2", (3.4,), [1, 1, 1, 1]),  # 0.961 + 0 + 0.240 + 2.162 = 3.363
        ("seq_mean_k2", (0.85,), [1, 1, 1, 1]),  # 0.841
        ("seq_mean_k2", (0.83,), [0, 0, 0, 0]),
        ("seq_sum_k3", (5.9,), [1, 1, 1, 1]),  # 11.25 - 4 - log 4 = 5.864
        ("seq_mean_k3", (1.45,), [0, 0, 0, 0]),  # 1.466
        ("seq_max_k2", (2.2,), [1, 1, 1, 1]),
        ("seq_max_k3", (4.9,), [0, 0, 0, 0]),  # 4.921
    ],
)
def test_rejection_by_hand(mode, threshold, expected):
    np.testing.assert_array_equal(correction.kept(GAP, mode, threshold), np.array(expected, bool))
    assert correction.kept(np.zeros(0), mode, threshold).shape == (0,)


def test_every_mode_of_the_config_is_known():
    choices = {f.name: f.metadata["choices"] for f in dataclasses.fields(AlgorithmConfig) if "choices" in f.metadata}
    for mode in set(choices["rollout_rs"]) - {"m2po"}:  # which ranks a round (token_credit.py)
        assert correction.kept(np.zeros(3), mode, (1.5,)).all()  # on-policy nothing is rejected
    for mode in choices["rollout_is"]:
        np.testing.assert_array_equal(correction.importance(np.zeros(3), mode, VERSIONS[:3]), np.ones(3))


def test_metrics_by_hand():
    """Two answers: weights 1/4 1 2 | 2 of ratios 1/4 1 2 | 8; one token rejected, in the second."""
    got = correction.describe(
        [RATIOS[:3], RATIOS[3:]], [RATIOS[:3], np.array([2.0])], [np.ones(3, bool), np.zeros(1, bool)], (2.0,)
    )
    w = np.array([0.25, 1, 2, 2])
    assert got == pytest.approx(
        {
            "rollout_corr/rollout_is_mean": 1.3125,
            "rollout_corr/rollout_is_std": w.std(),
            "rollout_corr/rollout_is_min": 0.25,
            "rollout_corr/rollout_is_max": 2.0,
            "rollout_corr/rollout_is_eff_sample_size": 1.3125**2 / (9.0625 / 4),
            "rollout_corr/rollout_is_ratio_fraction_high": 0.25,
            "rollout_corr/rollout_is_ratio_fraction_low": 0.25,
            "rollout_corr/rollout_rs_masked_fraction": 0.25,
            "rollout_corr/rollout_rs_seq_masked_fraction": 0.5,
        }
    )


def test_metrics_at_their_edges_by_hand():
    """Bounds 1/2 and 2 are met, not passed; an answer with one token rejected of two is a masked answer."""
    given = np.array([0.5, 2.0]), np.array([0.4999, 2.0001]), np.array([1.0])
    keeps = [np.array([True, False]), np.ones(2, bool), np.ones(1, bool)]
    for threshold in ((2.0,), (0.5, 2.0)):
        got = correction.describe(given, given, keeps, threshold)
        assert got["rollout_corr/rollout_is_ratio_fraction_low"] == pytest.approx(1 / 5)
        assert got["rollout_corr/rollout_is_ratio_fraction_high"] == pytest.approx(1 / 5)
        assert got["rollout_corr/rollout_rs_masked_fraction"] == pytest.approx(1 / 5)
        assert got["rollout_corr/rollout_rs_seq_masked_fraction"] == pytest.approx(1 / 3)
