"""Rewards without a grader: a rollout is right or wrong at random, depending on the rollout alone.

Invariant: a reward is a pure function of the rollout's id and length. When the length grows by a factor e, the
log-odds of being right grow by `slope`. So a scheduler that selects rollouts by length changes the mean reward.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

import numpy as np

from jaxrl_post.history import Past
from jaxrl_post.sim.answers import noise
from jaxrl_post.types import Group, Rollout, frozen


class Lengths:
    """The lengths and rewards of each prompt's last epoch, in the form of history.History, without tokens."""

    def __init__(self):
        self._last: dict[str, Past] = {}

    def of(self, prompt_id: str) -> tuple[Past, ...]:
        return (self._last[prompt_id],) if prompt_id in self._last else ()

    def record(self, group: Group) -> None:
        sizes = [len(rollout) for rollout in group.rollouts]
        self._last[group.prompt.id] = Past(
            epoch=group.rollouts[0].id.epoch,
            tokens=_NO_TOKENS,
            favourites=_NO_TOKENS,
            rewards=group.rewards,
            scored=group.scored,
            versions=np.array([int(rollout.versions[-1]) for rollout in group.rollouts], np.int32),
            offsets=np.cumsum([0, *sizes], dtype=np.int64),
        )


_NO_TOKENS = frozen(np.zeros(0, np.int32))


class SimRewards:
    """A protocols.Rewards. A rollout of `middle` tokens is right with probability 1/2.

    Each of `records` records every scored group.
    """

    def __init__(self, *, slope: float = 0.0, middle: float = 560.0, records: Sequence[Lengths] = ()):
        self._slope, self._middle, self._records = slope, middle, records
        self._started = 0

    def start(self, rollout: Rollout) -> None:
        self._started += 1

    def join(self, group: Group) -> Group:
        right = np.array([self._right(rollout) for rollout in group.rollouts], np.float32)
        scored = dataclasses.replace(group, rewards=right, scored=np.ones(right.size, bool), components={"acc": right})
        for record in self._records:
            record.record(scored)
        return scored

    def _right(self, rollout: Rollout) -> bool:
        logit = self._slope * math.log(max(len(rollout), 1) / self._middle)
        key = int.from_bytes(rollout.id.seed().tobytes(), "little")
        return noise(key, 0, -3) < 1 / (1 + math.exp(-logit))

    def metrics(self) -> dict[str, float]:
        started, self._started = self._started, 0
        return {"reward/num_started": float(started)}
