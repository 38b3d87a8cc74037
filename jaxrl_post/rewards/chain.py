"""What stands between the pool of graders and the ring."""

from __future__ import annotations

from jaxrl_post.protocols import Rewards
from jaxrl_post.rewards import NoScores
from jaxrl_post.types import Group, Rollout


class FirstScores:
    """A protocols.Rewards around `rewards` that refuses to go on when the first `groups` groups, a round, hold not one
    score: NoScores. Later rounds are no longer looked at; their unscored rollouts are counted in the metrics."""

    def __init__(self, rewards: Rewards, groups: int):
        self._rewards, self._groups = rewards, groups
        self._seen = self._answers = 0
        self._found = False

    def start(self, rollout: Rollout) -> None:
        self._rewards.start(rollout)

    def join(self, group: Group) -> Group:
        scored = self._rewards.join(group)
        self._found |= bool(scored.scored.any())
        self._seen += 1
        self._answers += len(scored.rollouts)
        if self._seen == self._groups and not self._found:
            raise NoScores(
                f"training: none of the first {self._groups} groups' {self._answers} answers could be scored: the "
                "graders failed, twice each, as the warnings above say, or apply to none of the prompts"
            )
        return scored

    def metrics(self) -> dict[str, float]:
        return self._rewards.metrics()
