"""How long an optimizer step keeps new weights from the engine.

Invariant: this time counts engine steps. It is computed from a cost table before the run, never measured. So weights
change at the same clock in every process and in every repetition.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from jaxrl_post.ring.types import Group
from jaxrl_post.scheduler.forecast import ReplicaCapacity


class Pace:
    """How long an optimizer step keeps new weights from the engine, in engine steps.

    By default learner and engine share devices, and the engine rests while the learner works."""

    def steps(self, groups: Sequence[Group]) -> float:
        """Returns engine steps that pass during an optimizer step on these groups. 0: the engine rests until the step
        is done.
        """
        return 0.0

    def pieces(self, groups: Sequence[Group]) -> int:
        """Returns the number of pieces, of about equal size, in which the learner gets the groups. The first piece goes
        at once.
        """
        return 1


class Split(Pace):
    """A Pace for a learner with devices of its own.

    Args:
      engine: slots and step cost of a replica. All slots are assumed full.
      token_s: seconds of training per token.
      step_s: seconds of an optimizer step beside its tokens.
    """

    def __init__(self, engine: ReplicaCapacity, *, token_s: float, step_s: float = 0.0):
        self._engine, self._token_s, self._step_s = engine, token_s, step_s

    def steps(self, groups: Sequence[Group]) -> float:
        lengths = [len(rollout) for group in groups for rollout in group.rollouts]
        slots, context = self._engine.slots, (_tokens(groups) - sum(lengths) / 2) / len(lengths)
        step_s = float(np.max(self._engine.cost(np.array([slots]), np.array([slots * context]))))
        return (self._step_s + self._token_s * _tokens(groups)) / step_s


class Interleaved(Pace):
    """A Pace for shared devices on which micro-batches and engine steps alternate within one optimizer step.

    After each micro-batch of `piece` tokens the engine runs for `ratio` times the seconds of that micro-batch. Total
    time is decode work plus training work in any order, so no work is saved. The gain is that no rollout waits for a
    whole optimizer step. The cost is that new weights arrive later.

    Args:
      work: predicts the seconds of training.
      ratio: engine seconds per second of training.
      piece: tokens of a micro-batch.
    """

    def __init__(self, work: Split, *, ratio: float, piece: int):
        self._work, self._ratio, self._piece = work, ratio, piece

    def steps(self, groups: Sequence[Group]) -> float:
        return self._ratio * self._work.steps(groups)

    def pieces(self, groups: Sequence[Group]) -> int:
        return min(max(round(_tokens(groups) / self._piece), 1), len(groups))


def _tokens(groups: Sequence[Group]) -> int:
    """Returns the number of trained tokens, prompts included."""
    return sum(len(rollout) + group.prompt.tokens.size for group in groups for rollout in group.rollouts)


def begins(*, clock: int, until: float, ended: int) -> float:
    """Returns the engine clock at which an optimizer step begins.

    It begins when its batch is complete, and not before the learner is free. If the step before ended at this very
    clock, the learner has been free since `until`.

    Args:
      clock: when the batch is complete.
      until: when the step before was due.
      ended: when the weights of the step before were published.
    """
    return min(until, clock) if ended == clock else clock
