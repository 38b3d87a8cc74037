"""Intervals of what a few seeds measured."""

from __future__ import annotations

import statistics
from collections.abc import Sequence


def ratio_of_medians(theirs: Sequence[float], ours: Sequence[float]) -> tuple[float, float, float]:
    """Returns the ratio of medians and its 95 % bootstrap interval. Seeds of the two arms are drawn apart."""
    import numpy as np

    random = np.random.default_rng(0)
    drawn = [np.median(random.choice(values, (4000, len(values))), axis=1) for values in (theirs, ours)]
    low, high = np.percentile(drawn[0] / drawn[1], (2.5, 97.5))
    return statistics.median(theirs) / statistics.median(ours), float(low), float(high)


def ratio_of_paired_medians(theirs: Sequence[float], ours: Sequence[float]) -> tuple[float, float, float]:
    """Returns the ratio of medians and its 95 % bootstrap interval. The two values of a seed are drawn together."""
    import numpy as np

    pairs = np.array([theirs, ours]).T
    drawn = np.median(pairs[np.random.default_rng(0).integers(0, len(pairs), (4000, len(pairs)))], axis=1)
    low, high = np.percentile(drawn[:, 0] / drawn[:, 1], (2.5, 97.5))
    return statistics.median(theirs) / statistics.median(ours), float(low), float(high)


def ratio_of_paired_means(ours: Sequence[float], theirs: Sequence[float]) -> tuple[float, float, float]:
    """Returns mean(ours) / mean(theirs) and its 95 % bootstrap interval. Pairs are drawn together."""
    import numpy as np

    pairs = np.array([ours, theirs]).T
    drawn = pairs[np.random.default_rng(0).integers(0, len(pairs), (4000, len(pairs)))].mean(axis=1)
    low, high = np.percentile(drawn[:, 0] / drawn[:, 1], (2.5, 97.5))
    return float(pairs[:, 0].mean() / pairs[:, 1].mean()), float(low), float(high)


def difference_of_means(ours: Sequence[float], theirs: Sequence[float]) -> tuple[float, float]:
    """Returns Welch's 95 % interval of mean(ours) - mean(theirs)."""
    from scipy import stats

    found = stats.ttest_ind(ours, theirs, equal_var=False).confidence_interval(0.95)
    return float(found.low), float(found.high)
