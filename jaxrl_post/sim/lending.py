"""Computes the seconds of a step that lends replicas to the learner while a round drains.

This is the stream trainer of RollPacker (arXiv 2509.21009, section 5.3). Once a share of a round's rollouts has
finished, some devices train on complete groups while the others keep generating. At the end of the round all devices
train on the remaining groups. A run does this with `scheduler.lend`. Here the seconds are computed from a round that
was simulated without lending.

Invariant: a step with lending never takes longer than a step without. Both train on the same groups: the sum of
gradients is exact, and only its order differs. The slower steps of the fuller replicas are not modelled. They cost at
most 1 % according to the paper.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from jaxrl_post.types import Group, Rollout


def step_s(
    done: Sequence[float],
    groups: Sequence[tuple[float, float]],
    *,
    rollout_s: float,
    train_s: float,
    first: float = 0.2,
    share: float = 0.5,
    migrate_s: float = 3.0,
) -> float:
    """Returns the seconds of a step, generation and training together.

    Args:
      done: seconds from the start of the round to the end of each rollout.
      groups: for each trained group, the second at which it was complete, and its share of the training.
      rollout_s, train_s: seconds of generation and of training without lending.
      first: share of the rollouts that must have finished before devices are lent.
      share: share of the devices that are lent.
      migrate_s: seconds from the start of the loan until the lent devices train.
    """
    if not done:
        return rollout_s + train_s
    at, left = sorted(done)[math.ceil(first * len(done)) - 1] + migrate_s, 1.0
    for whole, part in sorted(groups):
        end = max(at, whole) + part * train_s / share
        if end > rollout_s:
            break
        at, left = end, left - part
    return rollout_s + left * train_s


class Moments:
    """A listener of the ring that records the second of each clock of a round. `now`: seconds of the engine."""

    def __init__(self, now: Callable[[], float]):
        self._now, self._begun = now, now()
        self._at: dict[int, float] = {}
        self._done: list[float] = []

    def stepped(self, finished: Sequence[Rollout], clock: int) -> None:
        self._at[clock] = self._now() - self._begun
        self._done += [self._at[clock]] * len(finished)

    def round_over(self, groups: Sequence[Group], *, rollout_s: float, train_s: float) -> float:
        """Returns `step_s` of the round that ends. Groups of earlier rounds count as complete at the start."""
        tokens = [sum(map(len, group.rollouts)) for group in groups]
        whole = [max(self._at.get(rollout.finish_clock, 0.0) for rollout in group.rollouts) for group in groups]
        found = step_s(
            self._done,
            [(end, own / sum(tokens)) for end, own in zip(whole, tokens)],
            rollout_s=rollout_s,
            train_s=train_s,
        )
        self._at, self._done, self._begun = {}, [], self._now()
        return found
