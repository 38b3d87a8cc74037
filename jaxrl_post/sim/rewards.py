"""Rewards without a grader: right or wrong by a coin that depends on the rollout alone.

Invariant: a score is a pure function of the rollout's id and its length. `slope`: how many logits the chance of being right
gains a factor e of the length, so that a scheduler that selects by length shows in the mean reward.
"""

from __future__ import annotations

import dataclasses
import math

import numpy as np

from jaxrl_post.sim.answers import noise
from jaxrl_post.types import Group, Rollout


class SimRewards:
    """A protocols.Rewards. Half of the answers of `middle` tokens are right."""

    def __init__(self, *, slope: float = 0.0, middle: float = 560.0):
        self._slope, self._middle = slope, middle
        self._started = 0

    def start(self, rollout: Rollout) -> None:
        self._started += 1

    def join(self, group: Group) -> Group:
        right = np.array([self._right(rollout) for rollout in group.rollouts], np.float32)
        return dataclasses.replace(group, rewards=right, scored=np.ones(right.size, bool), components={"acc": right})

    def _right(self, rollout: Rollout) -> bool:
        logit = self._slope * math.log(max(len(rollout), 1) / self._middle)
        key = int.from_bytes(rollout.id.seed().tobytes(), "little")
        return noise(key, 0, -3) < 1 / (1 + math.exp(-logit))

    def metrics(self) -> dict[str, float]:
        started, self._started = self._started, 0
        return {"reward/num_started": float(started)}
