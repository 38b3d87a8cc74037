"""Estimates from several rollouts a prompt: pass@k, and bootstrap intervals of means.

Everything here is a pure function of its arguments. An interval draws with a fixed seed, so that it is the same each time.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

DRAWS = 10_000  # of a bootstrap
_AT_ONCE = 1 << 22  # numbers drawn at once, which bounds the memory


def pass_at(n: int, right: int, k: int) -> float:
    """Returns the unbiased estimate of pass@k from n rollouts of a prompt (arXiv 2107.03374, equation 1).

    It is 1 - C(n - right, k) / C(n, k): the share of all sets of k rollouts that have a right one.

    Raises:
      ValueError: k is not in 1..n, or `right` not in 0..n.
    """
    if not 1 <= k <= n:
        raise ValueError(f"pass@k: k={k} must be 1 to {n}, the rollouts of a prompt")
    if not 0 <= right <= n:
        raise ValueError(f"pass@k: {right} of {n} rollouts cannot be right")
    return 1.0 - math.comb(n - right, k) / math.comb(n, k)


def mean_interval(values: Sequence[float], *, share: float = 0.95, seed: int = 0) -> tuple[float, float]:
    """Returns the percentile bootstrap interval of the mean of independent values, one a prompt.

    Of differences between two arms, prompt by prompt, it is the paired interval.

    Args:
      share: of the resamples that the interval holds.

    Raises:
      ValueError: no values, a value that is not finite, or `share` not between 0 and 1.
    """
    given = np.asarray(values, np.float64)
    if given.size == 0 or not np.isfinite(given).all():
        raise ValueError(f"an interval needs finite values, got {given.size} with {int(np.sum(~np.isfinite(given)))} not")
    if not 0.0 < share < 1.0:
        raise ValueError(f"share={share} of an interval must be between 0 and 1")
    random, step = np.random.default_rng(seed), max(1, _AT_ONCE // given.size)
    means = [
        given[random.integers(given.size, size=(min(step, DRAWS - first), given.size))].mean(axis=1)
        for first in range(0, DRAWS, step)
    ]
    low, high = np.quantile(np.concatenate(means), ((1 - share) / 2, (1 + share) / 2))
    return float(low), float(high)
