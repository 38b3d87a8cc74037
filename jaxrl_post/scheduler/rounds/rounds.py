"""Rounds: what all policies with a round barrier share, and the synchronous policy.

Invariant: what a round trains on is a function of (prompts, run seed, rewards). Where groups race, it also depends on
the engine clocks at which rollouts finished. It never depends on how fast rewards arrive. Every admitted (epoch,
prompt) ends exactly once:

- trained
- filtered: it has one value in all rollouts (scheduler/group_filter.py)
- refused: it was kept, but the round was already full

A round never trains on an incomplete group.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from jaxrl_post.scheduler import group_filter
from jaxrl_post.scheduler.groups import Open, PromptOrder, revived, written
from jaxrl_post.scheduler.ledger import Ledger, LedgerState
from jaxrl_post.scheduler.placement.placement import LeastLoaded, Placement
from jaxrl_post.scheduler.rounds.delivery import Delivery, WholeRounds
from jaxrl_post.types import Capacity, Group, Part, Request, RolloutId

_COUNTERS = ("num_rounds", "num_waves", "num_groups_refused", "num_groups_streamed")


@dataclass
class RoundState(LedgerState):
    """The plain values that a checkpoint holds.

    Attributes:
      round: batches trained on.
      batches: batches of this round.
      waves: waves of this round.
      seen: groups scored in this round.
      taken: groups handed out in this round.
      unsolved: groups filtered in this round that have a rollout that is not right.
      to_finish: groups of this wave that are still incomplete.
      to_score: groups of this wave that were requested for scoring and have no scores yet.
    """

    round: int = 0
    batches: int = 1
    waves: int = 0
    seen: int = 0
    taken: int = 0
    unsolved: int = 0
    to_finish: int = 0
    to_score: int = 0


class Rounds(Ledger):
    """Waves of whole groups, until the batch of a round is full.

    Subclasses decide which groups a wave opens and how many complete groups end it (`_next_wave`). With
    `filter_groups`, a group whose scored rollouts all have one value is left out. After a whole wave is scored, another
    wave refills the round. Its size follows from the share of groups that the round has kept so far. The first
    `prompts_per_round` kept groups by admission are the batch (dynamic sampling, DAPO, arXiv 2503.14476, section 3.2).
    """

    name = "rounds"
    State = RoundState
    _state: RoundState

    def __init__(
        self,
        prompts: PromptOrder,
        *,
        steps: int,
        prompts_per_round: int,
        filter_groups: bool,
        max_waves: int,
        filter_metric: str = group_filter.SUMMED[0],
        replicas: int,
        mini_batches: int = 1,
        ppo_epochs: int = 1,
        placement: Placement | None = None,
        delivery: Delivery | None = None,
        **ledger: Any,
    ):
        """Makes a scheduler before its first round.

        Args:
          prompts: the endless order of training prompts.
          steps: rounds of the run.
          prompts_per_round: groups of a batch.
          filter_groups: whether groups with equal values of `filter_metric` are left out.
          max_waves: waves after which a round that is not full is an error.
          replicas: replicas of the engine.
          mini_batches: optimizer steps per batch. Only the default delivery reads it.
          ppo_epochs: passes over a round. Only the default delivery reads it.
          placement: None: LeastLoaded.
          delivery: None: WholeRounds.
          ledger: as Ledger.

        Raises:
          ValueError: `mini_batches` does not divide `prompts_per_round`.
        """
        if prompts_per_round % mini_batches:
            raise ValueError(f"scheduler.mini_batches={mini_batches} must divide scheduler.prompts={prompts_per_round}")
        super().__init__(prompts, placement=placement or LeastLoaded(replicas), **ledger)
        self._delivery = delivery or WholeRounds(mini_batches, ppo_epochs)
        self._steps, self._size = steps, prompts_per_round
        self._filter_groups, self._metric, self._max_waves = filter_groups, filter_metric, max_waves
        self._kept: list[Open] = []  # groups of this round that are not handed out yet

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
        return self._size * self._state.batches

    @property
    def _room(self) -> int:
        """Returns how many kept groups the round still lacks."""
        return self._wanted - self._state.taken - len(self._kept)

    def _check_waves(self) -> None:
        """Raises NoGroups or Solved when all waves of the round were used."""
        if self._state.waves == self._max_waves:
            kept, state = len(self._kept), self._state
            raise group_filter.ended(
                self._metric,
                begun=state.round > 0,
                kept=f"kept {kept} of the {self._wanted} groups of round {state.round + 1}",
                left_out=state.seen - kept,
                unsolved=state.unsolved,
                waves=f"scheduler.max_waves={self._max_waves} waves ({state.seen} groups scored)",
            )

    def _wave_size(self) -> int:
        """Returns how many groups the next wave shall complete."""
        if self._state.waves <= 1:
            return self._wanted
        return min(self._wanted, -(-self._room * self._state.seen // max(len(self._kept), 1)))

    def _became_whole(self, opened: Open, clock: int) -> list[RolloutId]:
        self._state.to_finish -= 1
        return []

    def due(self) -> list[Group]:
        """Returns groups to score now, in order of admission."""
        ready = sorted(self._delivery.due(self._whole, self._state.to_finish == 0), key=lambda opened: opened.rank)
        self._state.to_score += len(ready)
        return self._ask(ready)

    def scored(self, group: Group) -> None:
        """Stores the scores of a group. Groups that leave the wave are filtered, kept or refused in order."""
        opened = self._keep_score(group)
        self._state.to_score -= 1
        last = self._state.to_score == self._state.to_finish == 0 and not self._whole
        settled = self._delivery.settled(opened, self._open.values(), last)
        kept: list[Open] = []
        left: list[Open] = []
        for done in settled:
            useful = not self._filter_groups or group_filter.differs(done.scored_group, self._metric)
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
        """The number of rollouts in the round."""
        return self._wanted * self._group_size

    @property
    def max_tokens(self) -> int:
        """The most tokens of a rollout."""
        return self._max_tokens

    def late(self) -> list[Open]:
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

    def kind(self) -> str:
        """Returns the kind of the next round. Here all rounds are alike."""
        return ""

    def state_dict(self) -> dict:
        """Returns the state as plain values and arrays. Between rounds it holds little more than counters."""
        return super().state_dict() | {"kept": [written(opened) for opened in self._kept]}

    def load_state_dict(self, state: Mapping) -> None:
        super().load_state_dict(state)
        self._kept = [revived(opened, self._prompts) for opened in state["kept"]]

    @property
    def _counters(self) -> tuple[str, ...]:
        return super()._counters + _COUNTERS


class Sync(Rounds):
    """A protocols.Scheduler whose rounds take the next prompts in order and wait for all of them."""

    name = "sync"

    def _next_wave(self, clock: int) -> tuple[list[list[Request]], int]:
        count = self._wave_size()
        return [self._open_group() for _ in range(count)], count
