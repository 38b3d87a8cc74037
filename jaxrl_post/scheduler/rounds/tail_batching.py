"""Tail batching that trains on every sample it drew: groups are put off whole and go on with the same seeds.

Against RollPacker (arXiv 2509.21009), which redraws a slow prompt and drops the slow answers of a fast one, and so learns
from shorter answers than the policy gives: here only prompts are over-provisioned, and at frozen weights a run trains on
exactly the tokens that synchronous rounds would, in another order. When weights move, three ways to go on:

  verify     what the group had becomes candidates: kept as far as the new weights give the same tokens. The group is what
             the new weights would have given from the start. Finished rollouts are candidates too, their end like any token.
  recompute  what was generated stays, with its log-probs and versions; only what is missing is generated.
  restart    it begins again with the same seeds: the tokens of `verify`, without its saving.

Which groups are put off was decided by answers of the older weights. So under drift verify and restart train on shorter answers
than the policy gives, by as much as one draws anew; recompute does not (scripts/shows/unbiased.py measures both).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from jaxrl_post.history import Past
from jaxrl_post.scheduler.groups import Open, PromptOrder
from jaxrl_post.scheduler.rounds.races import Races
from jaxrl_post.types import PREFIX_MODES, Finish, Request, Rollout, Stop


class TailBatching(Races):
    """A protocols.Scheduler. With filters, groups in the queue when the run ends are trained by nobody and counted as
    queued."""

    name = "tail batching"

    def __init__(
        self,
        prompts: PromptOrder,
        *,
        over: float,
        prefix_mode: str = "verify",
        long_batches: int = 1,
        lane: float = 0.0,
        past: Callable[[str], Sequence[Past]] = lambda prompt_id: (),
        group_size: int,
        **rounds: Any,
    ):
        """
        Args:
          over, long_batches, lane, past: as Races.
          prefix_mode: how a group that was put off goes on, one of PREFIX_MODES.
          group_size, rounds: as Rounds.
        """
        if prefix_mode not in PREFIX_MODES:
            raise ValueError(f"scheduler.prefix_mode must be one of {', '.join(PREFIX_MODES)}, got {prefix_mode!r}")
        super().__init__(
            prompts,
            over=over,
            launched=group_size,
            long_batches=long_batches,
            lane=lane,
            past=past,
            group_size=group_size,
            **rounds,
        )
        self._prefix_mode = prefix_mode

    def _put_off(self, loser: Open) -> None:
        self._counts["num_tokens_deferred"] += sum(map(len, loser.rollouts.values()))

    def _keep(self, opened: Open, rollout: Rollout) -> None:
        kept = opened.prefixes if rollout.finish is Finish.PARKED else opened.rollouts
        assert rollout.id.sample not in opened.rollouts, f"{rollout.id} came back twice"
        self._counts["num_tokens_deferred"] += len(rollout)
        if len(rollout):
            kept[rollout.id.sample] = rollout

    def _again(self, opened: Open) -> list[Request]:
        if self._prefix_mode == "verify":
            opened.prefixes |= opened.rollouts
            opened.rollouts = {}
        elif self._prefix_mode == "restart":
            had = [*opened.prefixes.values(), *opened.rollouts.values()]
            self._counts["num_tokens_discarded"] += sum(map(len, had))
            opened.prefixes, opened.rollouts = {}, {}
        return self._enter(opened, self._prefix_mode)

    def held(self) -> list[Rollout]:
        waiting = self._queue.values() if self._prefix_mode == "recompute" else ()  # else they are generated once more
        return super().held() + [rollout for opened in waiting for rollout in opened.rollouts.values()]

    def complete(self, rollout: Rollout) -> Stop:
        opened = self._open.get((rollout.id.epoch, rollout.id.prompt_id))
        if opened is not None and rollout.id.sample in opened.prefixes:
            before = opened.prefixes.pop(rollout.id.sample).tokens
            self._counts["num_tokens_discarded"] += before.size - _agreeing(before, rollout.tokens)
        return super().complete(rollout)


def _agreeing(one: Sequence[int], other: Sequence[int]) -> int:
    """Tokens up to the first difference."""
    size = min(len(one), len(other))
    differ = one[:size] != other[:size]
    return int(differ.argmax()) if differ.any() else size
