"""How fast replicas go: tokens per unit of the engine's clock, and the seconds that pass meanwhile.

Invariant: seconds are computed from a cost, never measured. `LockStep`: all replicas are one program, the clock counts
its steps, and a step lasts as long as that of the slowest replica. `Independent`: each replica steps on its own, there is
no common step, and the clock counts ticks of equal length.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np


class Cost(Protocol):
    """Of an engine step: cost.DecodeCost or cost.TableCost."""

    prefill_s: float

    def __call__(self, rows: np.ndarray, context: np.ndarray) -> np.ndarray:
        """Seconds of a step of each replica."""


@dataclass(frozen=True, kw_only=True)
class Drafts:
    """Speculation where at most `most_running` answers run: each then gets `tokens` tokens a step on average, for `width`
    rows more."""

    tokens: float = 1.0
    width: int = 0
    most_running: int = 0

    def __post_init__(self):
        if not 1 <= self.tokens <= self.width + 1:
            raise ValueError(f"drafts: tokens={self.tokens} a step must lie between 1 and width + 1 = {self.width + 1}")

    def rates(self, running: np.ndarray) -> np.ndarray:
        """Tokens a step of each answer."""
        return np.where(running <= self.most_running, self.tokens, 1.0)

    def rows(self, running: np.ndarray) -> np.ndarray:
        return np.where(running <= self.most_running, running * (1 + self.width), running)


NO_DRAFTS = Drafts()


class Pace(Protocol):
    """What the engine asks. All arrays are per replica: answers `running`, tokens of KV in `context`."""

    def rates(self, running: np.ndarray, context: np.ndarray, tokens: np.ndarray) -> np.ndarray:
        """Tokens that each answer gets per unit of the clock, over the next `tokens` of them."""

    def stall(self, forced: float) -> float:
        """Units of the clock in which a replica that prefills `forced` tokens does nothing else."""

    def seconds(self, running: np.ndarray, context: np.ndarray, units: float, forced: np.ndarray) -> float:
        """That pass in `units` of the clock, `context` being that in the middle, when `forced` tokens were prefilled."""


class LockStep:
    """The clock counts steps of one program over all replicas; prefill goes between steps."""

    def __init__(self, cost: Cost, drafts: Drafts = NO_DRAFTS):
        self._cost, self._drafts = cost, drafts

    def rates(self, running: np.ndarray, context: np.ndarray, tokens: np.ndarray) -> np.ndarray:
        return self._drafts.rates(running)

    def stall(self, forced: float) -> float:
        return 0.0

    def seconds(self, running: np.ndarray, context: np.ndarray, units: float, forced: np.ndarray) -> float:
        step = self._cost(self._drafts.rows(running), context).max()
        return float(units * step + self._cost.prefill_s * forced.max())


class Independent:
    """The clock counts ticks of `tick_s` seconds; each replica steps as fast as its own rows and context let it."""

    def __init__(self, cost: Cost, tick_s: float, drafts: Drafts = NO_DRAFTS):
        if not tick_s > 0:
            raise ValueError(f"tick_s={tick_s} must be above 0")
        self._cost, self._tick_s, self._drafts = cost, tick_s, drafts

    def rates(self, running: np.ndarray, context: np.ndarray, tokens: np.ndarray) -> np.ndarray:
        middle = context + running * tokens / 2
        return self._drafts.rates(running) * self._tick_s / self._cost(self._drafts.rows(running), middle)

    def stall(self, forced: float) -> float:
        return self._cost.prefill_s * forced / self._tick_s

    def seconds(self, running: np.ndarray, context: np.ndarray, units: float, forced: np.ndarray) -> float:
        return units * self._tick_s
