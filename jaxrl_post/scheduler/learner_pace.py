"""How long the engine does without the weights of an optimizer step, and a scheduler that goes on meanwhile.

Invariant: it is counted in engine steps, foreseen from a cost given beforehand, never waited for: so weights change at the
same clock in every process and in every repetition.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np

from jaxrl_post.scheduler.forecast import Replica
from jaxrl_post.types import Group


class Pace(Protocol):
    """How long an optimizer step keeps new weights from the engine, in engine steps."""

    def steps(self, groups: Sequence[Group]) -> float:
        """Of a step on these; 0: the engine rests until it is done."""

    def pieces(self, groups: Sequence[Group]) -> int:
        """In how many of like size the learner gets them over that time, the first at once."""


class TimeShared:
    """A Pace: learner and engine share their devices, so one rests while the other works."""

    def steps(self, groups: Sequence[Group]) -> float:
        return 0.0

    def pieces(self, groups: Sequence[Group]) -> int:
        return 1


class Split:
    """A Pace: the learner has devices of its own. `step_s`, `token_s`: what an optimizer step takes it, and each trained token
    more; `engine`: what the engine holds and what a step of it costs, taken with all slots full."""

    def __init__(self, engine: Replica, *, token_s: float, step_s: float = 0.0):
        self._engine, self._token_s, self._step_s = engine, token_s, step_s

    def steps(self, groups: Sequence[Group]) -> float:
        lengths = [len(rollout) for group in groups for rollout in group.rollouts]
        slots, context = self._engine.slots, (_tokens(groups) - sum(lengths) / 2) / len(lengths)
        step_s = float(np.max(self._engine.cost(np.array([slots]), np.array([slots * context]))))
        return (self._step_s + self._token_s * _tokens(groups)) / step_s

    def pieces(self, groups: Sequence[Group]) -> int:
        return 1


class Interleaved:
    """A Pace: learner and engine share their devices and take turns within an optimizer step, a micro-batch of `piece` tokens
    and then engine steps of `ratio` times its seconds, which `work` foresees. Time is decode plus training work in any order: no
    step of either is saved, but no answer stands still for a whole optimizer step, and new weights come that much later."""

    def __init__(self, work: Split, *, ratio: float, piece: int):
        self._work, self._ratio, self._piece = work, ratio, piece

    def steps(self, groups: Sequence[Group]) -> float:
        return self._ratio * self._work.steps(groups)

    def pieces(self, groups: Sequence[Group]) -> int:
        return min(max(round(_tokens(groups) / self._piece), 1), len(groups))


def _tokens(groups: Sequence[Group]) -> int:
    """That go through the learner."""
    return sum(len(rollout) + group.prompt.tokens.size for group in groups for rollout in group.rollouts)


def begins(*, clock: int, until: float, ended: int) -> float:
    """The engine clock at which an optimizer step begins whose batch is whole at `clock`: as soon as the learner is free, which it
    is since `until` where the step before ended at this very clock.

    Args:
      until: when the step before was due; ended: the clock at which its weights were published.
    """
    return min(until, clock) if ended == clock else clock
