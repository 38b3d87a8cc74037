"""A scheduler around one that works in rounds: what both must offer, and a base that hands every call on."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

from jaxrl_post.protocols import Scheduler
from jaxrl_post.scheduler.groups import Open
from jaxrl_post.types import Capacity, Group, Layout, Part, Request, Rollout, Stop


class RoundScheduler(Scheduler, Protocol):
    """A protocols.Scheduler that works in rounds, and says how far the present one is."""

    @property
    def over(self) -> bool:
        """Whether no further round comes."""

    @property
    def full(self) -> bool:
        """Whether the round has all its groups and not all of them were taken."""

    @property
    def num_rollouts(self) -> int:
        """Rollouts of the round."""

    @property
    def max_tokens(self) -> int:
        """Longest rollout allowed."""

    def late(self) -> list[Open]:
        """Returns admitted groups that lack rollouts and that the round waits for; none in a race."""

    def kind(self) -> str:
        """Returns which sort of round opens next."""

    def metrics(self) -> dict[str, float]:
        """Counters since the last call, by metric name."""


class AroundRounds:
    """A RoundScheduler that hands every call on to the one inside. Subclasses change some of the calls."""

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
