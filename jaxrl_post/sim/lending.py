"""Replicas lent to the learner while a round drains (RollPacker, arXiv 2509.21009, section 5.3), as seconds of a step.

When a share of a round's answers is done, part of the devices train on groups that are whole while the others go on
generating; what is left at the end is trained on by all. A run does so by `scheduler.lend`; here it is reckoned beside a round
that was simulated without. Invariant: a step with lending never takes longer than without, and what is trained on is the same: the
sum is exact, only its order is not. Left out: the slower steps of the fuller replicas, at most 1 % by the paper.
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
    """Seconds of a step.

    Args:
      done: seconds since the round began at which each answer was done.
      groups: of each group trained on the seconds at which it was whole, and its share of the training.
      rollout_s, train_s: of the round without lending.
      first: share of the answers that is done before devices are lent; `share`: of the devices; `migrate_s`: until they train.
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
    """A listener of the ring that knows the second of each clock of this round. `now`: of the engine."""

    def __init__(self, now: Callable[[], float]):
        self._now, self._begun = now, now()
        self._at: dict[int, float] = {}
        self._done: list[float] = []

    def stepped(self, finished: Sequence[Rollout], clock: int) -> None:
        self._at[clock] = self._now() - self._begun
        self._done += [self._at[clock]] * len(finished)

    def round_over(self, groups: Sequence[Group], *, rollout_s: float, train_s: float) -> float:
        """`step_s` of the round that ends; what an earlier round finished was whole at the start."""
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
