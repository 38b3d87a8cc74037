"""Tail batching that trains on every rollout it sampled: whole groups are deferred and resume with the same seeds.

RollPacker (arXiv 2509.21009) draws a slow prompt anew and drops the slow rollouts of a fast prompt. So it trains on
shorter rollouts than the policy samples. This scheduler over-provisions prompts only. At frozen weights a run trains on
exactly the tokens of synchronous rounds, in another order.

When weights change, a deferred group resumes in one of three ways:

- verify: its tokens become candidates, and are kept as far as the new weights sample the same ones. The result is what
  the new weights sample from the start. Finished rollouts are candidates too, and so is the token that ended them.
- recompute: generated tokens stay, with their log-probs and versions. Only missing tokens are generated.
- restart: the group starts again with the same seeds. It yields the tokens of verify without its savings.

Lengths under older weights decide which groups are deferred. So while weights change, verify and restart train on
shorter rollouts than the policy samples. The bias is as large as with groups drawn anew. recompute has no such bias
(scripts/shows/unbiased.py measures both).
"""

from __future__ import annotations

from typing import Any

import numpy as np

from jaxrl_post.config import SchedulerConfig
from jaxrl_post.ring.types import PREFIX_MODES, Finish, Request, Rollout, Stop
from jaxrl_post.scheduler.ledger import PendingGroup, PromptOrder
from jaxrl_post.scheduler.rounds.races import Races


class TailBatching(Races):
    """A protocols.Scheduler. With filters, groups in the queue at the end of a run are never trained on and are counted
    as queued.
    """

    name = "tail batching"

    def __init__(self, prompts: PromptOrder, options: SchedulerConfig, **run: Any):
        """`run`: as Ledger.

        Raises:
          ValueError: an unknown `prefix_mode`.
        """
        if options.prefix_mode not in PREFIX_MODES:
            raise ValueError(
                f"scheduler.prefix_mode must be one of {', '.join(PREFIX_MODES)}, got {options.prefix_mode!r}"
            )
        super().__init__(prompts, options, **run)

    def _defer(self, loser: PendingGroup) -> None:
        """Counts the tokens of finished rollouts, which stay with the group."""
        self._counts["num_tokens_deferred"] += sum(map(len, loser.rollouts.values()))

    def _keep(self, opened: PendingGroup, rollout: Rollout) -> None:
        """Stores a rollout with its group: a parked one as a prefix, a finished one as finished."""
        kept = opened.prefixes if rollout.finish is Finish.PARKED else opened.rollouts
        assert rollout.id.sample not in opened.rollouts, f"{rollout.id} came back twice"
        self._counts["num_tokens_deferred"] += len(rollout)
        if len(rollout):
            kept[rollout.id.sample] = rollout

    def _again(self, opened: PendingGroup) -> list[Request]:
        """Returns the requests with which the group resumes, as `prefix_mode` says."""
        if self._options.prefix_mode == "verify":
            opened.prefixes |= opened.rollouts
            opened.rollouts = {}
        elif self._options.prefix_mode == "restart":
            had = [*opened.prefixes.values(), *opened.rollouts.values()]
            self._counts["num_tokens_discarded"] += sum(map(len, had))
            opened.prefixes, opened.rollouts = {}, {}
        return self._enter(opened, self._options.prefix_mode)

    def held(self) -> list[Rollout]:
        """Returns finished rollouts of groups that have no scores yet. In recompute mode this includes the queue, since
        its finished rollouts are not generated again.
        """
        waiting = (
            self._queue.values() if self._options.prefix_mode == "recompute" else ()
        )  # other modes generate these rollouts again
        return super().held() + [rollout for opened in waiting for rollout in opened.rollouts.values()]

    def complete(self, rollout: Rollout) -> Stop:
        """Counts the tokens of a prefix that verification rejected, and stores the rollout."""
        opened = self._open.get((rollout.id.epoch, rollout.id.prompt_id))
        if opened is not None and rollout.id.sample in opened.prefixes:
            before = opened.prefixes.pop(rollout.id.sample).tokens
            self._counts["num_tokens_discarded"] += before.size - _agreeing(before, rollout.tokens)
        return super().complete(rollout)


def _agreeing(one: np.ndarray, other: np.ndarray) -> int:
    size = min(len(one), len(other))
    differ = one[:size] != other[:size]
    return int(differ.argmax()) if differ.any() else size
