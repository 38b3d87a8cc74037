"""Probability distributions of rollout lengths. A length is drawn from two uniform numbers.

Invariant: with `beyond` = d the length follows exactly the distribution given that it is longer than d. Lengths are positive
real numbers here. Rollouts round them up to whole tokens, at most the cap.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import NormalDist
from typing import Protocol

import numpy as np

_NORMAL = NormalDist()
_LEAST = 1e-300  # smallest survival probability that is inverted: inv_cdf is not defined at 0


class LengthDistribution(Protocol):
    """The distribution of the rollout lengths of one prompt."""

    def draw(self, which: float, where: float, beyond: float) -> float:
        """Returns a length above `beyond` >= 0 from two numbers uniform in (0, 1).

        `which` selects a component of the distribution. `where` selects a length within the component.
        """


@dataclass(frozen=True, slots=True)
class Uniform:
    """1 to `longest` tokens, each equally likely (PipelineRL, arXiv 2509.19128, appendix A)."""

    longest: int

    def draw(self, which: float, where: float, beyond: float) -> float:
        return beyond + where * max(self.longest - beyond, 0.0)


@dataclass(frozen=True, slots=True)
class LogNormal:
    """Lengths exp(Normal(mu, sigma))."""

    mu: float
    sigma: float

    def survival(self, length: float) -> float:
        """Returns P(longer than `length`)."""
        return 1.0 if length <= 0 else _NORMAL.cdf((self.mu - math.log(length)) / self.sigma)

    def draw(self, which: float, where: float, beyond: float) -> float:
        left = max(where * self.survival(beyond), _LEAST)
        return max(math.exp(self.mu - self.sigma * _NORMAL.inv_cdf(left)) if left < 1 else 0.0, beyond)


@dataclass(frozen=True, slots=True)
class LogUniform:
    """Lengths between `low` and `high` whose logarithm is uniform."""

    low: float
    high: float

    def survival(self, length: float) -> float:
        """Returns P(longer than `length`)."""
        return min(max(math.log(self.high / max(length, self.low)) / math.log(self.high / self.low), 0.0), 1.0)

    def draw(self, which: float, where: float, beyond: float) -> float:
        low = max(self.low, min(beyond, self.high))
        return low * (self.high / low) ** where


@dataclass(frozen=True, slots=True)
class Mixture:
    """Lengths drawn from `heavy` with probability `share`, else from `body`."""

    body: LogNormal
    heavy: LogUniform
    share: float

    def draw(self, which: float, where: float, beyond: float) -> float:
        heavy = self.share * self.heavy.survival(beyond)
        body = (1 - self.share) * self.body.survival(beyond)
        chosen = self.heavy if which * (heavy + body) < heavy else self.body
        return chosen.draw(which, where, beyond)


class Empirical:
    """Observed lengths, each equally likely. If none is above `beyond`, a draw is one token longer than `beyond`."""

    def __init__(self, lengths: Sequence[int]):
        self._sorted = np.sort(np.asarray(lengths, np.int64))
        if self._sorted.size == 0 or self._sorted[0] < 1:
            raise ValueError(
                f"observed lengths: {self._sorted.size} of them, the shortest "
                f"{self._sorted[:1].tolist()}; there must be one at least, and none below 1"
            )

    def draw(self, which: float, where: float, beyond: float) -> float:
        first = int(np.searchsorted(self._sorted, beyond, side="right"))
        left = self._sorted.size - first
        return float(self._sorted[first + int(where * left)]) if left else beyond + 1.0


def spread(tail: float, group: int) -> float:
    """Returns the sigma of a log-normal distribution whose longest of `group` lengths is on average `tail` times the mean.

    Raises:
      ValueError: no sigma up to 3 gives this tail.
    """
    low, high = 0.0, 3.0
    if not tail_of(low, group) <= tail <= tail_of(high, group):
        raise ValueError(
            f"a log-normal distribution's longest of {group} rollouts is 1 to {tail_of(high, group):.3g} times the mean "
            f"one, not {tail}; the nearest valid value is {min(max(tail, 1), tail_of(high, group)):.3g}"
        )
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if tail_of(middle, group) < tail else (low, middle)
    return (low + high) / 2


def tail_of(sigma: float, group: int) -> float:
    """Returns E[longest of `group` lengths] / E[length] of a log-normal distribution.

    Integrates G phi(z) Phi(z)^(G-1) e^(sigma z) by the trapezoid rule, with G = `group`. Divides by e^(sigma^2 / 2).
    """
    density = group * _PHI * _BELOW ** (group - 1) * np.exp(sigma * _Z)
    return float(np.trapezoid(density, _Z) / math.exp(sigma**2 / 2))


_Z = np.linspace(-12.0, 16.0, 2801)
_PHI = np.exp(-_Z * _Z / 2) / math.sqrt(2 * math.pi)
_BELOW = np.array([_NORMAL.cdf(value) for value in _Z.tolist()])
