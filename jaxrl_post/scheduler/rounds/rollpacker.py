"""Tail batching as RollPacker does it (arXiv 2509.21009, section 4.1, and its code), to be measured against.

Over-provisions prompts and responses: a short round launches over_prompts * P0 prompts of over_samples * R0 responses, keeps
the first R0 responses of the first P0 prompts and aborts the rest; a prompt that did not make it is drawn anew, from its
first token, in its long round. So slow answers are left out of what is learned: the policy trains on shorter answers than
it gives.

Deviations from its code: a response counts when it is generated, not when its reward is back, so slow graders do not select
the data; a long round keeps the order of the queue where the code shuffles it, which decides nothing but placement.
"""

from __future__ import annotations

import math
from typing import Any

from jaxrl_post.scheduler.groups import Open, PromptOrder
from jaxrl_post.scheduler.rounds.races import Races
from jaxrl_post.types import Request, Rollout, RolloutId


class RollPacker(Races):
    """A protocols.Scheduler."""

    name = "rollpacker"

    def __init__(
        self, prompts: PromptOrder, *, over_prompts: float, over_samples: float, group_size: int, **rounds: Any
    ):
        """
        Args:
          over_prompts, over_samples: the paper's eta of each, >= 1; it runs with 1.25 for both.
          group_size: R0, responses that a prompt is trained on.
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
        late = opened.ids(self._run_seed, opened.missing)
        self._placement.withdraw(late)
        return late + super()._became_whole(opened, clock)

    def _put_off(self, loser: Open) -> None:
        for rollout in loser.rollouts.values():
            self._keep(loser, rollout)
        loser.rollouts = {}
        loser.attempt += 1

    def _keep(self, opened: Open, rollout: Rollout) -> None:
        self._counts["num_tokens_discarded"] += len(rollout)

    def _again(self, opened: Open) -> list[Request]:
        return self._enter(opened)
