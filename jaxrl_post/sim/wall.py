"""How the seconds of a simulated engine and of a simulated learner add up: one after the other, or side by side.

Invariant: seconds are the engine's and the learner's own; nothing here changes what is simulated.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

from jaxrl_post.sim.learner import SimLearner
from jaxrl_post.types import Group


class Spent(NamedTuple):
    """Seconds since the start in which answers were generated or waited for, and in which the ring only trained."""

    generate_s: float
    train_s: float


class Engine(Protocol):
    @property
    def seconds(self) -> float:
        """Of all steps so far."""


class Wall(Protocol):
    """Told when an optimizer step begins, when it has ended, and when its weights are published."""

    def spent(self) -> Spent:
        """Up to now."""

    def begun(self, groups: Sequence[Group]) -> None:
        """The learner is about to accumulate these."""

    def committed(self) -> None:
        """The learner's seconds hold a step more."""

    def published(self) -> None:
        """Its weights are there."""


class OneAfterTheOther:
    """A Wall: learner and engine share devices."""

    def __init__(self, engine: Engine, learner: SimLearner):
        self._engine, self._learner = engine, learner

    def spent(self) -> Spent:
        return Spent(self._engine.seconds, self._learner.seconds)

    def begun(self, groups: Sequence[Group]) -> None:
        pass

    def committed(self) -> None:
        pass

    def published(self) -> None:
        pass


class SideBySide:
    """A Wall: each has its own devices. Whoever needs weights that are not there waits."""

    def __init__(self, engine: Engine, learner: SimLearner):
        self._engine, self._learner = engine, learner
        self._waited = self._until = self._learned = 0.0
        self._free = -1.0  # now, if a step was just published
        self._began: float | None = None  # of a step that is under way

    def spent(self) -> Spent:
        return Spent(self._engine.seconds + self._waited, 0.0)

    def begun(self, groups: Sequence[Group]) -> None:
        """A step that follows a publish at once waited for the learner: it began as soon as that was free."""
        if groups and self._began is None:
            now = self.spent().generate_s
            self._began = self._until if now == self._free else max(self._until, now)

    def committed(self) -> None:
        took, self._learned = self._learner.seconds - self._learned, self._learner.seconds
        self._until, self._began = self._began + took, None

    def published(self) -> None:
        self._waited += max(self._until - self.spent().generate_s, 0.0)
        self._free = self.spent().generate_s
