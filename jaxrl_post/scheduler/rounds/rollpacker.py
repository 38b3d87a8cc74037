"""Tail batching as RollPacker does it (arXiv 2509.21009, section 4.1, and its code), as a baseline.

RollPacker over-provisions prompts and responses. A short round launches over * P0 prompts with over_samples *
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

from jaxrl_post.config import SchedulerConfig
from jaxrl_post.ring.types import Request, Rollout, RolloutId
from jaxrl_post.scheduler.ledger import PendingGroup, PromptOrder
from jaxrl_post.scheduler.rounds.races import Races


class RollPacker(Races):
    """A protocols.Scheduler with RollPacker's races."""

    name = "rollpacker"

    def __init__(self, prompts: PromptOrder, options: SchedulerConfig, **run: Any):
        """`run`: as Ledger. The paper uses 1.25 for `over` and for `over_samples`."""
        if options.over_samples < 1:
            raise ValueError(f"scheduler.over_samples={options.over_samples} must be at least 1")
        super().__init__(prompts, options, **run)

    @property
    def _launched(self) -> int:
        return math.ceil(self._options.over_samples * self._options.group_size - 1e-9)

    def _on_group_complete(self, opened: PendingGroup, clock: int) -> list[RolloutId]:
        """Returns ids of surplus responses, and of the losers if the race is over."""
        late = opened.ids(self._run_seed, opened.missing)
        self._placement.withdraw(late)
        return late + super()._on_group_complete(opened, clock)

    def _defer(self, loser: PendingGroup) -> None:
        """Discards all rollouts of the group. Its next attempt has other seeds."""
        for rollout in loser.rollouts.values():
            self._keep(loser, rollout)
        loser.rollouts = {}
        loser.attempt += 1

    def _keep(self, opened: PendingGroup, rollout: Rollout) -> None:
        self._counts["num_tokens_discarded"] += len(rollout)

    def _again(self, opened: PendingGroup) -> list[Request]:
        return self._enter(opened)
