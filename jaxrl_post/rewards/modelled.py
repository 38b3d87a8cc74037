"""The score of a reward model, beside or in the place of reward functions.

The model is any function from texts of token ids to numbers, whose result for a text does not depend on the other texts.

Invariant: a score is added to a record before the record is journaled. A record from before a resume has it already.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import numpy as np

from jaxrl_post.types import Rollout, RolloutId

COMPONENT = "reward_model/score"


class Modelled:
    """Adds scores to the records of rollouts. Every process of a job calls it alike.

    Args:
      score: maps texts, int32[T] each, to numbers.
      weight: of a score in the reward.
      alone: there are no reward functions, so that a record without them is scored.
    """

    def __init__(self, score: Callable[[Sequence[np.ndarray]], np.ndarray], weight: float, *, alone: bool):
        self._score, self._weight, self._alone = score, weight, alone
        self._waiting: dict[RolloutId, np.ndarray] = {}
        self._found: dict[RolloutId, float] = {}

    def start(self, rollout: Rollout) -> None:
        """Takes a rollout, which is scored with others when the first of them is joined."""
        self._found.pop(rollout.id, None)
        self._waiting[rollout.id] = np.concatenate([rollout.prompt.tokens, rollout.tokens])

    def added(self, rollouts: Sequence[Rollout], records: Sequence[Mapping]) -> list[Mapping]:
        """Returns the records of started rollouts with their scores. Where a reward function failed, nothing is added."""
        return [self._with_score(rollout, record) for rollout, record in zip(rollouts, records, strict=True)]

    def metrics(self) -> dict[str, float]:
        """Returns nothing: a score costs one pass of a fixed shape."""
        return {}

    def _with_score(self, rollout: Rollout, record: Mapping) -> Mapping:
        id = rollout.id
        if "model" in record or not (record["scored"] or self._alone):
            self._waiting.pop(id, None)
            self._found.pop(id, None)
            return record
        if id not in self._waiting and id not in self._found:  # its journaled record served a group that changed since
            self.start(rollout)
        score = self._of(id)
        if not np.isfinite(score):
            return {**record, "model": None, "scored": False, "counts": {**record["counts"], "unscored": 1}}
        reward, components = record["reward"] + self._weight * score, {**record["components"], COMPONENT: score}
        return {**record, "model": score, "scored": True, "reward": reward, "components": components}

    def _of(self, id: RolloutId) -> float:
        """Returns a score. All rollouts that wait are scored together."""
        if id not in self._found:
            scores = self._score(list(self._waiting.values()))
            self._found.update(zip(self._waiting, map(float, scores), strict=True))
            self._waiting.clear()
        return self._found.pop(id)
