"""What tokens weigh, and what sums are divided by, by hand."""

import dataclasses

import numpy as np
import pytest

from jaxrl_post.algorithms.aggregation import AGGREGATIONS
from jaxrl_post.config import AlgorithmConfig

LENGTHS = np.array([0, 1, 3, 2])  # the first rollout is masked
VALUES = [[], [1.0], [9.0, 16.0, 36.0], [81.0, 100.0]]
SECOND, ITS_VALUES = np.array([4, 0]), [[1.0, 1.0, 1.0, 5.0], []]


@pytest.mark.parametrize(
    "mode, expected",
    [
        ("token-mean", (1 + 61 + 181 + 8) / 10),
        ("seq-mean-token-mean", (1 + 61 / 3 + 181 / 2 + 8 / 4) / 4),
        ("seq-mean-token-sum", (1 + 61 + 181 + 8) / 4),
        ("seq-mean-token-sum-norm", (1 + 61 + 181 + 8) / 20 / 4),
        ("prompt-mean", (243 / 6 + 8 / 4) / 2),
    ],
)
def test_two_groups_by_hand(mode, expected):
    total, count = 0.0, 0
    for lengths, values in ((LENGTHS, VALUES), (SECOND, ITS_VALUES)):
        weights, counts = AGGREGATIONS[mode](lengths, 20)
        assert weights.shape == counts.shape == lengths.shape and np.issubdtype(counts.dtype, np.integer)
        assert np.all(counts[lengths == 0] == 0) and np.all(np.isfinite(weights))
        total += sum(weight * sum(own) for weight, own in zip(weights, values, strict=True))
        count += counts.sum()
    assert total / count == pytest.approx(expected, rel=1e-14)


@pytest.mark.parametrize("mode", list(AGGREGATIONS))
def test_a_group_with_nothing_to_train_on_counts_nothing(mode):
    weights, counts = AGGREGATIONS[mode](np.zeros(3, int), 20)
    assert counts.sum() == 0 and np.all(np.isfinite(weights))


def test_names_are_those_of_the_config():
    choices = {
        f.name: set(f.metadata["choices"]) for f in dataclasses.fields(AlgorithmConfig) if "choices" in f.metadata
    }
    assert choices["loss_agg_mode"] == set(AGGREGATIONS)
