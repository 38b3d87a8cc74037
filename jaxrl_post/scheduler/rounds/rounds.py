"""Rounds: what all policies with a round barrier share, and the synchronous policy.

Invariant: what a round trains on is a function of (prompts, run seed, rewards). Where groups race, it also depends on
the engine clocks at which rollouts finished. It never depends on how fast rewards arrive. Every admitted (epoch,
prompt) ends exactly once:

- trained
- filtered: it has one value in all rollouts (scheduler/group_filter.py)
- refused: it was kept, but the round was already full

A round never trains on an incomplete group. A `Delivery` says when its complete groups are scored and handed to the learner:
all at once, or as they become complete. It never changes which groups a round trains on, only the order of the terms of the
gradient sum. In every round the weights stay fixed from the first accumulation to the commit.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from jaxrl_post.config import SchedulerConfig
from jaxrl_post.ring.types import Capacity, Group, Part, Request, RolloutId
from jaxrl_post.scheduler import group_filter
from jaxrl_post.scheduler.ledger import Ledger, LedgerState, PendingGroup, PromptOrder, group_state, restored

_COUNTERS = ("num_rounds", "num_waves", "num_groups_refused", "num_groups_streamed")


class Delivery(Protocol):
    """Decides what happens to groups after they are complete."""

    def due(self, whole: Sequence[PendingGroup], over: bool) -> Sequence[PendingGroup]:
        """Returns groups to score now.

        Args:
          whole: complete groups whose score was not requested yet.
          over: whether the wave has no incomplete group left that it waits for.
        """

    def settled(self, scored: PendingGroup, wave: Collection[PendingGroup], last: bool) -> Sequence[PendingGroup]:
        """Returns groups that leave the wave now that `scored` has its rewards.

        Args:
          scored: the group that was scored.
          wave: all groups of the wave.
          last: whether this was the last score of the wave.
        """

    def parts(self, kept: Sequence[PendingGroup], full: bool, batches: int) -> list[Part]:
        """Returns parts for the learner: either all kept groups, or none.

        Args:
          kept: groups that were kept and not handed out yet.
          full: whether the kept groups complete the round.
          batches: batches of the round.
        """


class WholeRounds:
    """A Delivery that hands out a round once it is full.

    Each batch is cut into `mini_batches` equal slices, in order, with one optimizer step each. The whole is repeated
    `ppo_epochs` times. All groups are fresh in the first part. Every part commits, and the last one publishes.
    """

    def __init__(self, mini_batches: int = 1, ppo_epochs: int = 1):
        self._mini_batches, self._ppo_epochs = mini_batches, ppo_epochs

    def due(self, whole: Sequence[PendingGroup], over: bool) -> Sequence[PendingGroup]:
        """Returns all groups of the wave once its last rollout has finished. Until then engine and graders work at the
        same time, and the ring does not wait for graders.
        """
        return whole if over else ()

    def settled(self, scored: PendingGroup, wave: Collection[PendingGroup], last: bool) -> Sequence[PendingGroup]:
        return list(wave) if last else ()

    def parts(self, kept: Sequence[PendingGroup], full: bool, batches: int) -> list[Part]:
        """Returns the slices of a full round, or nothing."""
        if not full:
            return []
        batch = tuple(opened.scored_group for opened in kept)
        size = len(batch) // (batches * self._mini_batches)
        slices = [batch[at : at + size] for _ in range(self._ppo_epochs) for at in range(0, len(batch), size)]
        return [
            Part(fresh=batch if n == 0 else (), groups=groups, commit=True, publish=n == len(slices) - 1)
            for n, groups in enumerate(slices)
        ]


class Streamed:
    """A Delivery that scores and hands out groups as soon as `size` of them are complete.

    Other groups are still generated meanwhile. The last part of the round commits and publishes. On devices that
    learner and engine share, this moves work and removes none. A round is one batch, because a commit within a round
    would change the weights that generate.
    """

    def __init__(self, size: int):
        self._size = size

    def due(self, whole: Sequence[PendingGroup], over: bool) -> Sequence[PendingGroup]:
        """Returns complete groups once there are `size` of them, or the wave is over."""
        return whole if over or len(whole) >= self._size else ()

    def settled(self, scored: PendingGroup, wave: Collection[PendingGroup], last: bool) -> Sequence[PendingGroup]:
        return (scored,)

    def parts(self, kept: Sequence[PendingGroup], full: bool, batches: int) -> list[Part]:
        """Returns one part with all kept groups, in order of admission."""
        assert batches == 1, f"a streamed round of {batches} batches"
        groups = tuple(opened.scored_group for opened in sorted(kept, key=lambda opened: opened.rank))
        return [Part(fresh=groups, groups=groups, commit=full, publish=full)] if groups else []


@dataclass
class RoundState(LedgerState):
    """The plain values that a checkpoint holds."""

    round: int = 0  # batches trained on
    batches: int = 1  # of this round
    waves: int = 0  # of this round
    seen: int = 0  # groups scored in this round
    taken: int = 0  # groups handed out in this round
    unsolved: int = 0  # groups filtered in this round that have a rollout that is not right
    to_finish: int = 0  # groups of this wave that are still incomplete
    to_score: int = 0  # groups of this wave that were requested for scoring and have no scores yet


class Rounds(Ledger):
    """Waves of whole groups, until the batch of a round is full.

    Subclasses decide which groups a wave opens and how many complete groups end it (`_next_wave`). With
    `filter_groups`, a group whose scored rollouts all have one value is left out. After a whole wave is scored, another
    wave refills the round. Its size follows from the share of groups that the round has kept so far. The first
    `prompts` kept groups by admission are the batch (dynamic sampling, DAPO, arXiv 2503.14476, section 3.2).
    """

    name = "rounds"
    State = RoundState
    _state: RoundState

    def __init__(self, prompts: PromptOrder, options: SchedulerConfig, **run: Any):
        """`run`: as Ledger.

        Raises:
          ValueError: `mini_batches` does not divide `prompts`.
        """
        if options.prompts % options.mini_batches:
            raise ValueError(
                f"scheduler.mini_batches={options.mini_batches} must divide scheduler.prompts={options.prompts}"
            )
        super().__init__(prompts, options, **run)
        whole = WholeRounds(options.mini_batches, options.ppo_epochs)
        self._delivery: Delivery = Streamed(options.stream) if options.stream else whole
        self._kept: list[PendingGroup] = []  # groups of this round that are not handed out yet

    def __str__(self) -> str:
        return (
            f"{self.name} round {self._state.round + 1} of {self._steps}, wave {self._state.waves}: {self._state.taken + len(self._kept)} "
            f"of {self._wanted} groups kept, {len(self._open)} open with {self._missing} rollouts missing, next "
            f"position {self._state.position}"
        )

    def admit(self, capacity: Capacity, clock: int) -> list[Request]:
        """Returns the requests of a whole wave when no group is open and rounds are left. The engine queues requests
        that find no slot.

        Raises:
          NoGroups, Solved: `max_waves` waves did not fill the round.
        """
        if not self._open and self._room and self._state.round < self._steps:
            self._check_waves()
            self._state.batches = self._state.batches if self._state.waves else self._open_round()
            self._state.waves += 1
            groups, ends = self._next_wave(clock)
            self._whole = [opened for opened in self._open.values() if opened.whole]
            self._state.to_finish = ends - len(self._whole)
            self._counts["num_waves"] += 1
            self._placement.place([group for group in groups if group], self._state.round)
        return self._placement.release(capacity)

    def _next_wave(self, clock: int) -> tuple[list[list[Request]], int]:
        """Opens the groups of the next wave. Returns their requests by group, and how many complete groups end the
        wave.
        """
        raise NotImplementedError

    def _open_round(self) -> int:
        """Returns how many batches the next round makes."""
        return 1

    @property
    def _wanted(self) -> int:
        """Returns how many groups the round trains on."""
        return self._options.prompts * self._state.batches

    @property
    def _room(self) -> int:
        """Returns how many kept groups the round still lacks."""
        return self._wanted - self._state.taken - len(self._kept)

    def _check_waves(self) -> None:
        """Raises NoGroups or Solved when all waves of the round were used."""
        if self._state.waves == self._options.max_waves:
            kept, state = len(self._kept), self._state
            raise group_filter.ended(
                self._options.filter_metric,
                begun=state.round > 0,
                kept=f"kept {kept} of the {self._wanted} groups of round {state.round + 1}",
                left_out=state.seen - kept,
                unsolved=state.unsolved,
                waves=f"scheduler.max_waves={self._options.max_waves} waves ({state.seen} groups scored)",
            )

    def _wave_size(self) -> int:
        """Returns how many groups the next wave shall complete."""
        if self._state.waves <= 1:
            return self._wanted
        return min(self._wanted, -(-self._room * self._state.seen // max(len(self._kept), 1)))

    def _on_group_complete(self, opened: PendingGroup, clock: int) -> list[RolloutId]:
        self._state.to_finish -= 1
        return []

    def due(self) -> list[Group]:
        ready = sorted(self._delivery.due(self._whole, self._state.to_finish == 0), key=lambda opened: opened.rank)
        self._state.to_score += len(ready)
        return self._ask(ready)

    def scored(self, group: Group) -> None:
        """Stores the scores of a group. Groups that leave the wave are filtered, kept or refused in order."""
        opened = self._keep_score(group)
        self._state.to_score -= 1
        last = self._state.to_score == self._state.to_finish == 0 and not self._whole
        settled = self._delivery.settled(opened, self._open.values(), last)
        kept: list[PendingGroup] = []
        left: list[PendingGroup] = []
        for done in settled:
            useful = not self._options.filter_groups or group_filter.differs(
                done.scored_group, self._options.filter_metric
            )
            (kept if useful else left).append(done)
        room = self._room
        self._kept += kept[:room]
        self._state.unsolved += sum(not group_filter.solved(done.scored_group) for done in left)
        self._state.seen += len(settled)
        self._counts.update(num_groups_filtered=len(left), num_groups_refused=len(kept[room:]))
        for done in settled:
            del self._open[done.key]

    @property
    def over(self) -> bool:
        """Whether no further round begins."""
        return self._state.round >= self._steps

    @property
    def full(self) -> bool:
        """Whether every group of the round is scored and kept, and some of them were not taken yet."""
        return bool(self._kept) and self._room == 0

    @property
    def num_rollouts(self) -> int:
        return self._wanted * self._options.group_size

    @property
    def max_tokens(self) -> int:
        return self._max_tokens

    def stragglers(self) -> list[PendingGroup]:
        """Returns admitted groups that lack rollouts and that the round waits for. In a race there are none."""
        return [opened for opened in self._open.values() if not opened.whole]

    def take(self) -> list[Part]:
        """Returns what the delivery hands out now, groups in order of admission."""
        parts = self._delivery.parts(self._kept, self._room == 0, self._state.batches)
        if parts:
            self._counts["num_groups_trained"] += len(self._kept)
            self._state.taken += len(self._kept)
            self._kept = []
            if not parts[-1].publish:
                self._counts["num_groups_streamed"] += sum(len(part.groups) for part in parts)
            else:
                self._state.round += self._state.batches
                self._counts["num_rounds"] += self._state.batches
                self._state.batches = 1
                self._state.waves = self._state.seen = self._state.taken = self._state.opened = self._state.unsolved = 0
        return parts

    def next_kind(self) -> str:
        """Returns the kind of the next round: `short`, `long`, or an empty string where all rounds are alike."""
        return ""

    def state_dict(self) -> dict:
        """Returns the state as plain values and arrays. Between rounds it holds little more than counters."""
        return super().state_dict() | {"kept": [group_state(opened) for opened in self._kept]}

    def load_state_dict(self, state: Mapping) -> None:
        super().load_state_dict(state)
        self._kept = [restored(opened, self._prompts) for opened in state["kept"]]

    @property
    def _counters(self) -> tuple[str, ...]:
        return super()._counters + _COUNTERS


class Sync(Rounds):
    """A protocols.Scheduler whose rounds take the next prompts in order and wait for all of them."""

    name = "sync"

    def _next_wave(self, clock: int) -> tuple[list[list[Request]], int]:
        count = self._wave_size()
        return [self._open_group() for _ in range(count)], count
