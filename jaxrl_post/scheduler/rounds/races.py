"""Short and long rounds: what all kinds of tail batching share (RollPacker, arXiv 2509.21009, section 4.1).

A short round launches more prompts than it trains on. The groups that are complete first, by `finish_clock`, are its
batch. The others join a queue. When the queue holds enough groups, a long round takes them in their order and waits for
all of them. A period is 1/(over - 1) short rounds and one long round.

A long round may take `long_batches` batches at once. It lasts as long as one batch would. It then trains on one batch
after the other, so the tokens of its n-th batch are n - 1 steps old. The same holds for mini-batches of a larger round.

Invariant: no prompt is deferred twice, because a long round is no race. Without filters a run launches exactly as many
prompts as it trains on. Its last rounds race only the prompts that are left, so the queue is empty at the end and no
group is refused. Engine clocks decide races, never the time that a reward takes.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from jaxrl_post.config import SchedulerConfig
from jaxrl_post.ring.types import Part, Request, Rollout, RolloutId
from jaxrl_post.scheduler.ledger import PendingGroup, PromptOrder, group_state, restored
from jaxrl_post.scheduler.rounds.rounds import Rounds, RoundState

_COUNTERS = (
    "num_long_rounds",
    "num_groups_deferred",
    "num_groups_sent_long",
    "num_rollouts_parked",
    "num_tokens_deferred",
    "num_tokens_discarded",
)
_UNKNOWN = 1 << 31  # tokens; no rollout is longer


@dataclass
class RaceState(RoundState):
    """The plain values that a checkpoint holds."""

    long: bool = False  # whether this is a long round
    limit: int = _UNKNOWN  # longest rollout that the last short round trained on, in tokens
    longest: int = 0  # longest rollout that this round trained on so far, in tokens
    parked_steps: int = 0  # longest wait of a group that resumed since the last `metrics`, in engine steps


class Races(Rounds):
    """Short and long rounds. Subclasses decide what happens to a group that loses a race (`_defer`, `_keep`,
    `_again`).
    """

    State = RaceState
    _state: RaceState

    def __init__(self, prompts: PromptOrder, options: SchedulerConfig, **run: Any):
        """`run`: as Ledger.

        Raises:
          ValueError: `over` is below 1. With 1 all rounds are synchronous.
        """
        super().__init__(prompts, options, **run)
        if options.over < 1:
            raise ValueError(
                f"scheduler.over={options.over} must be at least 1: a short round launches what it trains on and more"
            )
        self._queue: dict[tuple[int, str], PendingGroup] = {}

    def __str__(self) -> str:
        return f"{super().__str__()}, a {'long' if self._state.long else 'short'} one, {len(self._queue)} groups queue"

    @property
    def _launched(self) -> int:
        """Returns how many samples of a group a short round generates."""
        return self._options.group_size

    def _open_round(self) -> int:
        """Returns how many batches the next round makes. The last rounds of a run take all groups that are left."""
        self._state.long = self.next_kind() == "long"
        batches = self._most
        if self._left < self._options.prompts:
            batches = min(batches, (len(self._queue) + self._left) // self._options.prompts)
            assert batches, f"groups were lost: {self}"
        return batches if self._state.long else 1

    def _next_wave(self, clock: int) -> tuple[list[list[Request]], int]:
        """Opens the groups of a long round from the queue, or those of a race from the prompts."""
        need = self._wave_size()
        if self._state.long:
            keys = list(self._queue)[:need]
            requests = [self._resume(self._queue.pop(key), clock) for key in keys]
            return requests + [self._open_group() for _ in range(need - len(keys))], need
        drawn = [
            self._draw(self._launched) for _ in range(min(math.ceil(self._options.over * need - 1e-9), self._left))
        ]
        slow = self._foreseen(drawn, len(drawn) - need)
        for opened in slow:
            self._queue_up(opened, clock)
        self._counts["num_groups_sent_long"] += len(slow)
        return [self._enter(opened) for opened in drawn if opened.key not in self._queue], need

    def next_kind(self) -> str:
        """Returns the kind of the next round: `short` or `long`."""
        return (
            "long"
            if len(self._queue) >= self._most * self._options.prompts or self._left < self._options.prompts
            else "short"
        )

    @property
    def _most(self) -> int:
        """Returns how many batches a long round would take now."""
        return min(self._options.long_batches, self._steps - self._state.round)

    @property
    def _left(self) -> int:
        """Returns how many prompts may still be drawn. With filters this is unlimited, as filters leave out an unknown
        number of groups.
        """
        return (
            self._steps * self._options.prompts - self._state.position if not self._options.filter_groups else 1 << 62
        )

    def _foreseen(self, drawn: Sequence[PendingGroup], surplus: int) -> list[PendingGroup]:
        """Returns groups that history predicts to lose the race, in order of admission.

        Those are the longest of the groups whose newest record is longer than any rollout of the last short round. They
        save slots, pages and, in `restart`, tokens. They cost time where slots are free, as history may be wrong.
        """
        lengths = {}
        for opened in drawn if self._options.lane else ():
            past = self._past(opened.prompt.id)
            if past and max(past[0].lengths) > self._state.limit:
                lengths[opened.key] = int(max(past[0].lengths))
        slowest = set(sorted(lengths, key=lambda key: -lengths[key])[: int(self._options.lane * surplus)])
        return [opened for opened in drawn if opened.key in slowest]

    def _draw(self, launched: int) -> PendingGroup:
        """Returns a new group of the next prompt. ValueError: the prompt is in the queue."""
        return self._only(super()._draw(launched), self._queue)

    def _queue_up(self, opened: PendingGroup, clock: int) -> None:
        opened.since = clock
        self._queue[opened.key] = opened

    def _resume(self, opened: PendingGroup, clock: int) -> list[Request]:
        """Returns the requests of a queued group that joins a long round."""
        self._state.parked_steps = max(self._state.parked_steps, clock - opened.since)
        opened.launched = opened.size
        return self._again(opened)

    def stragglers(self) -> list[PendingGroup]:
        return super().stragglers() if self._state.long else []

    def _on_group_complete(self, opened: PendingGroup, clock: int) -> list[RolloutId]:
        """Ends the race when the last group that the wave needs is complete. Returns ids of the losers' running
        rollouts.
        """
        stop = super()._on_group_complete(opened, clock)
        if self._state.to_finish == 0:
            for loser in [racing for racing in self._open.values() if not racing.whole]:
                del self._open[loser.key]
                stop += loser.ids(self._run_seed, loser.missing)
                self._queue_up(loser, clock)
                self._counts["num_groups_deferred"] += 1
                self._defer(loser)
            self._placement.withdraw(stop)
        return stop

    def _defer(self, loser: PendingGroup) -> None:
        """Handles the finished rollouts of a group that is deferred."""
        raise NotImplementedError

    def _keep(self, opened: PendingGroup, rollout: Rollout) -> None:
        """Stores or discards a rollout of a deferred group: it was parked at the end of the race, or finished in the
        same dispatch.
        """
        raise NotImplementedError

    def _again(self, opened: PendingGroup) -> list[Request]:
        """Returns the requests with which a deferred group resumes in its long round."""
        raise NotImplementedError

    def _late(self, rollout: Rollout) -> None:
        """Gives a rollout to its deferred or complete group."""
        key = rollout.id.epoch, rollout.id.prompt_id
        self._keep(self._queue[key] if key in self._queue else self._open[key], rollout)

    def parked(self, rollouts: Sequence[Rollout]) -> None:
        """Separates rollouts of deferred groups from rollouts that move to another replica."""
        moved = []
        for rollout in rollouts:
            key = rollout.id.epoch, rollout.id.prompt_id
            if key in self._open and not self._open[key].whole:
                moved.append(rollout)
            else:
                self._counts["num_rollouts_parked"] += 1
                self._late(rollout)
        super().parked(moved)

    def take(self) -> list[Part]:
        parts = super().take()
        for part in parts:
            self._state.longest = max(
                [self._state.longest, *(len(rollout) for group in part.fresh for rollout in group.rollouts)]
            )
        if parts and parts[-1].publish:
            self._counts["num_long_rounds"] += self._state.long
            self._state.limit = self._state.limit if self._state.long else self._state.longest
            self._state.longest = 0
        return parts

    def state_dict(self) -> dict:
        return super().state_dict() | {"queue": [group_state(opened) for opened in self._queue.values()]}

    def load_state_dict(self, state: Mapping) -> None:
        super().load_state_dict(state)
        queue = [restored(opened, self._prompts) for opened in state["queue"]]
        self._queue = {opened.key: opened for opened in queue}

    def metrics(self) -> dict[str, float]:
        """Returns counts since the last call, the groups in the queue, and the longest wait.

        The wait counts engine steps of groups that resumed since the last call.
        """
        waited, self._state.parked_steps = self._state.parked_steps, 0
        return super().metrics() | {
            "sched/num_groups_queued": float(len(self._queue)),
            "sched/max_parked_steps": float(waited),
        }

    @property
    def _counters(self) -> tuple[str, ...]:
        return super()._counters + _COUNTERS
