"""Tail batching as RollPacker does it (arXiv 2509.21009, section 4.1, and its code), as a baseline.

RollPacker over-provisions prompts and responses. A short round launches over_prompts * P0 prompts with over_samples *
R0 responses each. It keeps the first R0 responses of the first P0 prompts and aborts the rest. A prompt that was not
among the first is generated anew in a long round, from its first token. Slow responses are thus dropped, so the policy
trains on shorter responses than it samples.

Deviations from its code:

- A response counts when it is generated, not when its reward arrives. So slow graders do not select the data.
- A long round keeps the order of the queue, which RollPacker shuffles. The order affects placement only.
"""

from __future__ import annotations

import math
from typing import Any

from jaxrl_post.scheduler.groups import Open, PromptOrder
from jaxrl_post.scheduler.rounds.races import Races
from jaxrl_post.types import Request, Rollout, RolloutId


class RollPacker(Races):
    """A protocols.Scheduler with RollPacker's races."""

    name = "rollpacker"

    def __init__(
        self, prompts: PromptOrder, *, over_prompts: float, over_samples: float, group_size: int, **rounds: Any
    ):
        """Makes a scheduler before its first round.

        Args:
          prompts: the endless order of training prompts.
          over_prompts: the paper's eta for prompts, >= 1. The paper uses 1.25.
          over_samples: the paper's eta for responses, >= 1. The paper uses 1.25.
          group_size: R0, the responses per prompt that are trained on.
          rounds: as Rounds.
        """
        if over_samples < 1:
            raise ValueError(f"scheduler.over_samples={over_samples} must be at least 1")
        super().__init__(
            prompts,
            over=over_prompts,
            launched=math.ceil(over_samples * group_size - 1e-9),
            group_size=group_size,
            **rounds,
        )

    def _became_whole(self, opened: Open, clock: int) -> list[RolloutId]:
        """Returns ids of surplus responses, and of the losers if the race is over."""
        late = opened.ids(self._run_seed, opened.missing)
        self._placement.withdraw(late)
        return late + super()._became_whole(opened, clock)

    def _put_off(self, loser: Open) -> None:
        """Discards all rollouts of the group. Its next attempt has other seeds."""
        for rollout in loser.rollouts.values():
            self._keep(loser, rollout)
        loser.rollouts = {}
        loser.attempt += 1

    def _keep(self, opened: Open, rollout: Rollout) -> None:
        """Counts the tokens of a discarded rollout."""
        self._counts["num_tokens_discarded"] += len(rollout)

    def _again(self, opened: Open) -> list[Request]:
        """Opens the group anew, without prefixes."""
        return self._enter(opened)
