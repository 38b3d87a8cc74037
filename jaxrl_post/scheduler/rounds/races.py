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
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from jaxrl_post.history import Past
from jaxrl_post.scheduler.groups import Open, PromptOrder, revived, written
from jaxrl_post.scheduler.rounds.rounds import Rounds, RoundState
from jaxrl_post.types import Part, Request, Rollout, RolloutId

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
    """The plain values that a checkpoint holds.

    - `long`: whether this is a long round.
    - `limit`: longest rollout that the last short round trained on, in tokens.
    - `longest`: longest rollout that this round trained on so far, in tokens.
    - `parked_steps`: longest wait of a group that resumed since the last `metrics`, in engine steps.
    """

    long: bool = False
    limit: int = _UNKNOWN
    longest: int = 0
    parked_steps: int = 0


class Races(Rounds):
    """Short and long rounds. Subclasses decide what happens to a group that loses a race (`_put_off`, `_keep`,
    `_again`).
    """

    State = RaceState
    _state: RaceState

    def __init__(
        self,
        prompts: PromptOrder,
        *,
        over: float,
        launched: int,
        long_batches: int = 1,
        lane: float = 0.0,
        past: Callable[[str], Sequence[Past]] = lambda prompt_id: (),
        **rounds: Any,
    ):
        """Makes a scheduler before its first round.

        Args:
          prompts: the endless order of training prompts.
          over: prompts that a short round launches per prompt that it trains on, >= 1. With 1 all rounds are
            synchronous.
          launched: samples of a group that a short round generates.
          long_batches: batches of a long round, >= 1.
          lane: between 0 and 1, the share of the surplus prompts that history may send to the queue without a race. It
            chooses prompts whose newest record is longer than any rollout of the last short round, longest first. This
            saves slots, pages and, in `restart`, tokens. It costs time where slots are free: history only predicts
            lengths, so short groups join the queue too.
          past: maps a prompt id to its records, newest first (history.History.of).
          rounds: as Rounds.
        """
        super().__init__(prompts, **rounds)
        if over < 1:
            raise ValueError(
                f"scheduler.over={over} must be at least 1: a short round launches what it trains on and more"
            )
        self._over, self._launched, self._long_batches, self._lane, self._past = (
            over,
            launched,
            long_batches,
            lane,
            past,
        )
        self._queue: dict[tuple[int, str], Open] = {}

    def __str__(self) -> str:
        return f"{super().__str__()}, a {'long' if self._state.long else 'short'} one, {len(self._queue)} groups queue"

    def _open_round(self) -> int:
        """Returns how many batches the next round makes. The last rounds of a run take all groups that are left."""
        self._state.long = self.kind() == "long"
        batches = self._most
        if self._left < self._size:
            batches = min(batches, (len(self._queue) + self._left) // self._size)
            assert batches, f"groups were lost: {self}"
        return batches if self._state.long else 1

    def _next_wave(self, clock: int) -> tuple[list[list[Request]], int]:
        """Opens the groups of a long round from the queue, or those of a race from the prompts."""
        need = self._wave_size()
        if self._state.long:
            keys = list(self._queue)[:need]
            requests = [self._take_up(self._queue.pop(key), clock) for key in keys]
            return requests + [self._open_group() for _ in range(need - len(keys))], need
        drawn = [self._draw(self._launched) for _ in range(min(math.ceil(self._over * need - 1e-9), self._left))]
        slow = self._foreseen(drawn, len(drawn) - need)
        for opened in slow:
            self._queue_up(opened, clock)
        self._counts["num_groups_sent_long"] += len(slow)
        return [self._enter(opened) for opened in drawn if opened.key not in self._queue], need

    def kind(self) -> str:
        """Returns the kind of the next round: `short` or `long`."""
        return "long" if len(self._queue) >= self._most * self._size or self._left < self._size else "short"

    @property
    def _most(self) -> int:
        """Returns how many batches a long round would take now."""
        return min(self._long_batches, self._steps - self._state.round)

    @property
    def _left(self) -> int:
        """Returns how many prompts may still be drawn. With filters this is unlimited, as filters leave out an unknown
        number of groups.
        """
        return self._steps * self._size - self._state.position if not self._filter_groups else 1 << 62

    def _foreseen(self, drawn: Sequence[Open], surplus: int) -> list[Open]:
        """Returns groups that history predicts to lose the race, in order of admission."""
        lengths = {}
        for opened in drawn if self._lane else ():
            past = self._past(opened.prompt.id)
            if past and max(past[0].lengths) > self._state.limit:
                lengths[opened.key] = int(max(past[0].lengths))
        slowest = set(sorted(lengths, key=lambda key: -lengths[key])[: int(self._lane * surplus)])
        return [opened for opened in drawn if opened.key in slowest]

    def _draw(self, launched: int) -> Open:
        """Returns a new group of the next prompt. ValueError: the prompt is in the queue."""
        return self._only(super()._draw(launched), self._queue)

    def _queue_up(self, opened: Open, clock: int) -> None:
        """Puts a group into the queue."""
        opened.since = clock
        self._queue[opened.key] = opened

    def _take_up(self, opened: Open, clock: int) -> list[Request]:
        """Returns the requests of a queued group that joins a long round."""
        self._state.parked_steps = max(self._state.parked_steps, clock - opened.since)
        opened.launched = opened.size
        return self._again(opened)

    def late(self) -> list[Open]:
        """Returns groups that a long round waits for. In a race there are none."""
        return super().late() if self._state.long else []

    def _became_whole(self, opened: Open, clock: int) -> list[RolloutId]:
        """Ends the race when the last group that the wave needs is complete. Returns ids of the losers' running
        rollouts.
        """
        stop = super()._became_whole(opened, clock)
        if self._state.to_finish == 0:
            for loser in [racing for racing in self._open.values() if not racing.whole]:
                del self._open[loser.key]
                stop += loser.ids(self._run_seed, loser.missing)
                self._queue_up(loser, clock)
                self._counts["num_groups_deferred"] += 1
                self._put_off(loser)
            self._placement.withdraw(stop)
        return stop

    def _put_off(self, loser: Open) -> None:
        """Handles the finished rollouts of a group that is deferred."""
        raise NotImplementedError

    def _keep(self, opened: Open, rollout: Rollout) -> None:
        """Stores or discards a rollout of a deferred group: it was parked at the end of the race, or finished in the
        same dispatch.
        """
        raise NotImplementedError

    def _again(self, opened: Open) -> list[Request]:
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
        """Returns parts for the learner, and updates the longest trained rollout."""
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
        return super().state_dict() | {"queue": [written(opened) for opened in self._queue.values()]}

    def load_state_dict(self, state: Mapping) -> None:
        super().load_state_dict(state)
        queue = [revived(opened, self._prompts) for opened in state["queue"]]
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
