"""The contract of schedulers with rounds, and wrappers around one: `Overlapped` begins a round before the learner
has finished the round before.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from typing import Protocol

from jaxrl_post.ring.protocols import Scheduler
from jaxrl_post.ring.types import Capacity, Group, Layout, Part, Request, Rollout, Stop
from jaxrl_post.scheduler.group_filter import NoGroups, Solved
from jaxrl_post.scheduler.learner_pace import Pace, begins
from jaxrl_post.scheduler.ledger import PendingGroup


class RoundScheduler(Scheduler, Protocol):
    """A protocols.Scheduler that works in rounds and reports the progress of the current round."""

    @property
    def over(self) -> bool:
        """Whether no further round begins."""

    @property
    def full(self) -> bool:
        """Whether every group of the round is scored and kept, and some of them were not taken yet."""

    @property
    def num_rollouts(self) -> int:
        """The number of rollouts in the round."""

    @property
    def max_tokens(self) -> int:
        """The most tokens of a rollout."""

    def stragglers(self) -> list[PendingGroup]:
        """Returns admitted groups that lack rollouts and that the round waits for. In a race there are none."""

    def next_kind(self) -> str:
        """Returns the kind of the next round: `short`, `long`, or an empty string where all rounds are alike."""

    def metrics(self) -> dict[str, float]:
        """Returns counters since the last call, by metric name."""


class AroundScheduler:
    """A RoundScheduler that delegates every call to the scheduler inside it. Subclasses override some of the calls."""

    def __init__(self, inside: RoundScheduler):
        self._inside = inside

    def __str__(self) -> str:
        return str(self._inside)

    def admit(self, capacity: Capacity, clock: int) -> list[Request]:
        return self._inside.admit(capacity, clock)

    def complete(self, rollout: Rollout) -> Stop:
        return self._inside.complete(rollout)

    def parked(self, rollouts: Sequence[Rollout]) -> None:
        self._inside.parked(rollouts)

    def due(self) -> list[Group]:
        return self._inside.due()

    def scored(self, group: Group) -> None:
        self._inside.scored(group)

    def take(self) -> list[Part]:
        return self._inside.take()

    def layout(self) -> Layout | None:
        return self._inside.layout()

    def held(self) -> Sequence[Rollout]:
        return self._inside.held()

    def state_dict(self) -> Mapping:
        return self._inside.state_dict()

    def load_state_dict(self, state: Mapping) -> None:
        self._inside.load_state_dict(state)

    def metrics(self) -> dict[str, float]:
        return self._inside.metrics()

    @property
    def over(self) -> bool:
        return self._inside.over

    @property
    def full(self) -> bool:
        return self._inside.full

    @property
    def num_rollouts(self) -> int:
        return self._inside.num_rollouts

    @property
    def max_tokens(self) -> int:
        return self._inside.max_tokens

    def stragglers(self) -> list[PendingGroup]:
        return self._inside.stragglers()

    def next_kind(self) -> str:
        return self._inside.next_kind()


@dataclass
class OverlapState:
    """The plain values that a checkpoint holds."""

    clock: int = 0  # engine steps
    until: float = 0.0  # the clock at which the learner's step is due
    ended: int = -1  # the clock of the last publish
    busy: bool = False  # whether the learner is at a step


class Overlapped(AroundScheduler):
    """Rounds of one optimizer step each, for a learner with devices of its own.

    While the learner trains on a round, the next round is generated with weights that are one step old. The optimizer
    step ends when it is due, or when the next round is full. At that moment its weights are swapped in under running
    rollouts. Until then the groups of a streamed round wait.
    """

    def __init__(self, scheduler: RoundScheduler, pace: Pace):
        super().__init__(scheduler)
        self._pace, self._state = pace, OverlapState()

    def __str__(self) -> str:
        return f"{self._inside}, the learner {'at work' if self._state.busy else 'at rest'}"

    def admit(self, capacity: Capacity, clock: int) -> list[Request]:
        self._state.clock = max(self._state.clock, clock)
        try:
            return self._inside.admit(capacity, clock)
        except (NoGroups, Solved):  # the step that is running ends first
            if not self._state.busy:
                raise
            self._state.until = self._state.clock
            return []

    def take(self) -> list[Part]:
        """Returns parts for the learner: the end of the running step once it is due, else the parts of the scheduler
        inside.
        """
        if self._state.busy:
            if self._state.clock < self._state.until and not self._inside.full:
                return []
            self._state.busy, self._state.ended = False, self._state.clock
            return [Part(fresh=(), groups=(), commit=True, publish=True)]
        parts = self._inside.take()
        if self._inside.over or not (parts and parts[-1].publish):
            return parts
        *pieces, last = parts
        assert not any(part.commit for part in pieces), "a round of one optimizer step was expected"
        begun = begins(clock=self._state.clock, until=self._state.until, ended=self._state.ended)
        self._state.busy = True
        self._state.until = begun + self._pace.steps([group for part in parts for group in part.groups])
        return [*pieces, replace(last, commit=False, publish=False)]

    def state_dict(self) -> dict:
        return asdict(self._state) | {"scheduler": self._inside.state_dict()}

    def load_state_dict(self, state: Mapping) -> None:
        self._state = OverlapState(**{field.name: state[field.name] for field in fields(OverlapState)})
        self._inside.load_state_dict(state["scheduler"])
