"""Adds up the seconds of a simulated engine and a simulated learner: one after the other, or side by side.

Invariant: seconds are those of the engine and of the learner. Nothing here changes the simulation.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

from jaxrl_post.sim.learner import SimLearner
from jaxrl_post.types import Group


class Spent(NamedTuple):
    """Seconds since the start.

    - `generate_s`: the engine generated or waited for the learner.
    - `train_s`: the ring did nothing but train.
    """

    generate_s: float
    train_s: float


class Engine(Protocol):
    @property
    def seconds(self) -> float:
        """Returns the seconds of all steps so far."""


class Wall(Protocol):
    """Adds up seconds. It is notified when an optimizer step begins, ends, and has its weights published."""

    def spent(self) -> Spent:
        """Returns the seconds up to now."""

    def begun(self, groups: Sequence[Group]) -> None:
        """Notes that the learner is about to accumulate these groups."""

    def committed(self) -> None:
        """Notes that the learner's seconds now include another step."""

    def published(self) -> None:
        """Notes that the weights of the step are published."""


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
    """A Wall: learner and engine have devices of their own.

    At a publish, the engine waits until the learner has finished the step.
    """

    def __init__(self, engine: Engine, learner: SimLearner):
        self._engine, self._learner = engine, learner
        self._waited = self._until = self._learned = 0.0
        self._free = -1.0  # second of the last publish
        self._began: float | None = None  # when the running step began

    def spent(self) -> Spent:
        return Spent(self._engine.seconds + self._waited, 0.0)

    def begun(self, groups: Sequence[Group]) -> None:
        """Notes when the step began. At the second of a publish, it began as soon as the learner was free."""
        if groups and self._began is None:
            now = self.spent().generate_s
            self._began = self._until if now == self._free else max(self._until, now)

    def committed(self) -> None:
        took, self._learned = self._learner.seconds - self._learned, self._learner.seconds
        self._until, self._began = self._began + took, None

    def published(self) -> None:
        self._waited += max(self._until - self.spent().generate_s, 0.0)
        self._free = self.spent().generate_s
