"""The contract of schedulers with rounds, and a wrapper that delegates every call to the scheduler inside it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

from jaxrl_post.protocols import Scheduler
from jaxrl_post.scheduler.groups import Open
from jaxrl_post.types import Capacity, Group, Layout, Part, Request, Rollout, Stop


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

    def late(self) -> list[Open]:
        """Returns admitted groups that lack rollouts and that the round waits for. In a race there are none."""

    def kind(self) -> str:
        """Returns the kind of the next round: `short`, `long`, or an empty string where all rounds are alike."""

    def metrics(self) -> dict[str, float]:
        """Returns counters since the last call, by metric name."""


class AroundRounds:
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

    def late(self) -> list[Open]:
        return self._inside.late()

    def kind(self) -> str:
        return self._inside.kind()
