"""How old tokens are when a simulated learner trains on them."""

from __future__ import annotations

from typing import Any


class Ages:
    """A protocols.Learner around `learner`, which records the age of tokens in optimizer steps.

    For each accumulation with groups: `first`, the mean age of a rollout's first token, and `oldest`, the age of the
    oldest token.
    """

    def __init__(self, learner: Any):
        self._learner = learner
        self.first: list[float] = []
        self.oldest: list[int] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._learner, name)

    def accumulate(self, groups) -> None:
        stale = [self._learner.step - rollout.versions for group in groups for rollout in group.rollouts]
        if stale:
            self.first.append(sum(float(one[0]) for one in stale) / len(stale))
            self.oldest.append(max(int(one.max()) for one in stale))
        self._learner.accumulate(groups)
