"""An engine that tells what goes into it and what comes out, for those who measure a run and take no part in it.

Invariant: it answers as the engine inside; nothing that a watcher does reaches the ring. What is cancelled is taken out as
what is parked is, and then let go: only so can be counted what had been generated of it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Protocol

from jaxrl_post.protocols import Engine
from jaxrl_post.types import Request, Rollout, RolloutId


class Watcher(Protocol):
    """Is told of training requests alone, in the order in which things happen. `clock`: engine steps; `version`: of the
    weights in use."""

    def launched(self, requests: Sequence[Request], clock: int, version: int) -> None:
        """The engine has taken them: new ones, and those that go on after they were parked."""

    def stepping(self, clock: int) -> None:
        """A dispatch begins."""

    def stepped(self, finished: Sequence[Rollout], clock: int) -> None:
        """It has ended; these are done."""

    def stopped(self, rollouts: Sequence[Rollout], clock: int, version: int, cancelled: bool) -> None:
        """They left the engine before their end, with what they have: to be gone on with, or for good."""


class Watched:
    """A protocols.Engine around `engine`, with those who watch it."""

    def __init__(self, engine: Engine, watchers: Sequence[Watcher]):
        self._engine, self._watchers = engine, tuple(watchers)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    def submit(self, requests: Sequence[Request]) -> None:
        self._engine.submit(requests)
        for watcher in self._watchers if requests else ():
            watcher.launched(requests, self._engine.clock, self._engine.version)

    def step(self) -> list[Rollout]:
        for watcher in self._watchers:
            watcher.stepping(self._engine.clock)
        finished = self._engine.step()
        for watcher in self._watchers:
            watcher.stepped(finished, self._engine.clock)
        return finished

    def cancel(self, ids: Iterable[RolloutId]) -> None:
        self._take_out(ids, cancelled=True)

    def park(self, ids: Iterable[RolloutId]) -> list[Rollout]:
        return self._take_out(ids, cancelled=False)

    def _take_out(self, ids: Iterable[RolloutId], cancelled: bool) -> list[Rollout]:
        rollouts = self._engine.park(ids)
        for watcher in self._watchers if rollouts else ():
            watcher.stopped(rollouts, self._engine.clock, self._engine.version, cancelled)
        return rollouts


class Heard:
    """Any part of the ring; listeners are told what some of its methods are about to be called with:
    {"prepare": [listener]}."""

    def __init__(self, part: Any, listeners: Mapping[str, Sequence[Callable[..., object]]]):
        self._part, self._listeners = part, listeners

    def __getattr__(self, name: str) -> Any:
        value, listeners = getattr(self._part, name), self._listeners.get(name, ())
        if not listeners:
            return value

        def heard(*arguments: Any) -> Any:
            for listener in listeners:
                listener(*arguments)
            return value(*arguments)

        return heard
