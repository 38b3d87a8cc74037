"""A learner without weights, and rewards without a grader.

The learner counts optimizer steps and computes the seconds that they would take. Invariant: `params` is the step number, so a
version describes simulated weights completely. The seconds of a step are:

- `token_s` for each trained token: old and reference log-probs, forward and backward pass.
- `step_s` for the step, whatever its tokens.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence

import numpy as np

from jaxrl_post.ring.history import Past
from jaxrl_post.ring.types import Group, Rollout, frozen
from jaxrl_post.simulate.texts import noise


class SimLearner:
    """A protocols.Learner. `seconds` is the duration of all steps so far."""

    def __init__(self, *, token_s: float = 0.0, step_s: float = 0.0):
        if min(token_s, step_s) < 0:
            raise ValueError(f"simulated learner: token_s={token_s} and step_s={step_s} must be at least 0")
        self._token_s, self._step_s = token_s, step_s
        self._tokens = 0
        self.step, self.seconds = 0, 0.0

    @property
    def params(self) -> int:
        return self.step

    def prepare(self, groups: Sequence[Group]) -> None:
        """Does nothing: its time is part of `token_s`."""

    def accumulate(self, groups: Sequence[Group]) -> None:
        """Counts the tokens of groups. Prompts count as trained tokens, because they pass through the model too."""
        self._tokens += sum(len(rollout) + group.prompt.tokens.size for group in groups for rollout in group.rollouts)

    def commit(self) -> Mapping[str, float]:
        seconds = self._step_s + self._tokens * self._token_s
        out = {"actor/num_tokens": float(self._tokens), "actor/seconds": seconds}
        self.seconds += seconds
        self._tokens = 0
        self.step += 1
        return out


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
            argmax_tokens=_NO_TOKENS,
            rewards=group.rewards,
            scored=group.scored,
            versions=np.array([int(rollout.versions[-1]) for rollout in group.rollouts], np.int32),
            offsets=np.cumsum([0, *sizes], dtype=np.int64),
        )


_NO_TOKENS = frozen(np.zeros(0, np.int32))


class SimRewards:
    """A protocols.Rewards: a rollout is right or wrong at random, depending on its id and its length alone.

    A rollout of `middle` tokens is right with probability 1/2. When the length grows by a factor e, the log-odds of being
    right grow by `slope`. So a scheduler that selects rollouts by length changes the mean reward.

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
