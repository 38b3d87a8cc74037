"""Rounds that begin before the learner has finished the round before."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields, replace

from jaxrl_post.scheduler.group_filter import NoGroups, Solved
from jaxrl_post.scheduler.learner_pace import Pace, begins
from jaxrl_post.scheduler.rounds.around import AroundRounds, RoundScheduler
from jaxrl_post.types import Capacity, Part, Request


@dataclass
class OverlapState:
    """The plain values that a checkpoint holds.

    - `clock`: engine steps.
    - `until`: the clock at which the learner's step is due.
    - `ended`: the clock of the last publish.
    - `busy`: whether the learner is at a step.
    """

    clock: int = 0
    until: float = 0.0
    ended: int = -1
    busy: bool = False


class Overlapped(AroundRounds):
    """A RoundScheduler for a learner with devices of its own, around rounds of one optimizer step each.

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
        self._state.busy, self._state.until = (
            True,
            begun + self._pace.steps([group for part in parts for group in part.groups]),
        )
        return [*pieces, replace(last, commit=False, publish=False)]

    def state_dict(self) -> dict:
        return asdict(self._state) | {"scheduler": self._inside.state_dict()}

    def load_state_dict(self, state: Mapping) -> None:
        self._state = OverlapState(**{field.name: state[field.name] for field in fields(OverlapState)})
        self._inside.load_state_dict(state["scheduler"])
