"""The speed of replicas: tokens per unit of the engine's clock, and seconds per unit of the clock.

Invariant: seconds are computed from a cost, never measured. There are two paces:

- `LockStep`: all replicas run in one program, and the clock counts its steps. A step takes as long as that of the
  slowest replica.
- `Independent`: each replica takes steps of its own. The clock counts ticks of equal length.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np


class Cost(Protocol):
    """The cost of an engine step: step_cost.DecodeCost or step_cost.TableCost."""

    prefill_s: float

    def __call__(self, rows: np.ndarray, context: np.ndarray) -> np.ndarray:
        """Returns the seconds of a step of each replica."""


@dataclass(frozen=True, kw_only=True)
class DraftSpeed:
    """Speculative decoding in replicas where at most `most_running` rollouts run.

    Each rollout there settles `tokens` tokens per step on average. It uses `width` additional rows.
    """

    tokens: float = 1.0
    width: int = 0
    most_running: int = 0

    def __post_init__(self):
        if not 1 <= self.tokens <= self.width + 1:
            raise ValueError(f"drafts: tokens={self.tokens} a step must lie between 1 and width + 1 = {self.width + 1}")

    def rates(self, running: np.ndarray) -> np.ndarray:
        """Returns the average tokens per step of a rollout, for each replica."""
        return np.where(running <= self.most_running, self.tokens, 1.0)

    def rows(self, running: np.ndarray) -> np.ndarray:
        return np.where(running <= self.most_running, running * (1 + self.width), running)


NO_DRAFTS = DraftSpeed()


class Pace(Protocol):
    """The speeds that the engine asks for. Arrays have one element per replica.

    `running` counts rollouts, `context` tokens in the KV cache, and `forced` tokens to prefill.
    """

    def rates(self, running: np.ndarray, context: np.ndarray, tokens: np.ndarray) -> np.ndarray:
        """Returns the tokens that each rollout gains per unit of the clock, over its next `tokens` tokens."""

    def stall(self, forced: float) -> float:
        """Returns for how many units of the clock a replica does nothing but prefill `forced` tokens."""

    def seconds(self, running: np.ndarray, context: np.ndarray, units: float, forced: np.ndarray) -> float:
        """Returns the seconds of `units` of the clock, including prefill. `context`: halfway through them."""


class LockStep:
    """The clock counts steps of one program over all replicas. Prefill happens between steps."""

    def __init__(self, cost: Cost, drafts: DraftSpeed = NO_DRAFTS):
        self._cost, self._drafts = cost, drafts

    def rates(self, running: np.ndarray, context: np.ndarray, tokens: np.ndarray) -> np.ndarray:
        return self._drafts.rates(running)

    def stall(self, forced: float) -> float:
        return 0.0

    def seconds(self, running: np.ndarray, context: np.ndarray, units: float, forced: np.ndarray) -> float:
        step = self._cost(self._drafts.rows(running), context).max()
        return float(units * step + self._cost.prefill_s * forced.max())


class Independent:
    """The clock counts ticks of `tick_s` seconds. The speed of a replica depends on its own rows and context."""

    def __init__(self, cost: Cost, tick_s: float, drafts: DraftSpeed = NO_DRAFTS):
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
