"""Listeners to scored groups, besides the scheduler."""

from __future__ import annotations

from jaxrl_post.rewards import NoScores
from jaxrl_post.types import Group


class FirstScores:
    """Refuses a run whose first `groups` groups, a round, hold no score. Later rounds are not checked: the metrics count
    their unscored rollouts."""

    def __init__(self, groups: int):
        self._groups = groups
        self._seen = self._rollouts = 0
        self._found = False

    def scored(self, group: Group) -> None:
        """Listens to the ring's event `scored`.

        Raises:
          NoScores: the first round is complete and holds no score.
        """
        self._found |= bool(group.scored.any())
        self._seen += 1
        self._rollouts += len(group.rollouts)
        if self._seen == self._groups and not self._found:
            raise NoScores(
                f"training: none of the first {self._groups} groups' {self._rollouts} rollouts could be scored: the "
                "graders failed, twice each, as the warnings above say, or apply to none of the prompts"
            )
