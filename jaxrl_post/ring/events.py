"""The ring's events, the timing of its calls, and host work that is deferred to a dispatch.

The loop emits events in the order in which they happen. Listeners of one event are called in the order of their
registration. Listeners only measure a run: no result of a listener affects a decision.

| event | arguments | when |
|---|---|---|
| preparing | groups | before the learner prepares groups that it sees for the first time |
| accumulating | groups | before the learner accumulates gradients of groups |
| committed | metrics, part | after an optimizer step, with all parts since the step before as one |
| published | version | after the engine has taken new weights |
| launched | requests, clock, version | after the engine has taken requests, at least one |
| stepping | clock | before a dispatch |
| stepped | finished rollouts, clock | after a dispatch |
| stopped | parked rollouts, clock, version | after rollouts left the engine unfinished, at least one |
| scored | scored group | after the rewards of a group were joined, before the scheduler gets it |

`clock` counts engine steps. `version` is the version of the weights in use.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any

from jaxrl_post.ring.timing import Stopwatch

EVENTS = ("preparing", "accumulating", "committed", "published", "launched", "stepping", "stepped", "stopped", "scored")


class Ring:
    """A protocols.Ring that makes every call at once and reads no clock."""

    def __init__(self) -> None:
        self._listeners: dict[str, list[Callable[..., object]]] = {event: [] for event in EVENTS}

    def on(self, event: str, *listeners: Callable[..., object]) -> None:
        """Registers listeners of an event, after those already registered. Raises KeyError for an unknown event."""
        self._listeners[event] += listeners

    def tell(self, event: str, *what: Any) -> None:
        """Calls every listener of an event with these arguments."""
        for listener in self._listeners[event]:
            listener(*what)

    def call(self, phase: str, function: Callable[..., Any], *arguments: Any) -> Any:
        """Calls the function and returns its result."""
        return function(*arguments)

    def later(self, phase: str, function: Callable[..., object], *arguments: Any) -> None:
        """Calls the function at once."""
        self.call(phase, function, *arguments)

    def flush(self) -> None:
        """Does nothing, because no call is deferred."""


class TimedRing(Ring):
    """A protocols.Ring that counts seconds by phase and defers host work until a dispatch is running.

    Invariant: deferred calls run in the order in which they were deferred, and before anything that needs one of them.
    When they run depends only on dispatches and calls. So a run with deferred work computes the same as a run without.
    """

    def __init__(self, watch: Stopwatch) -> None:
        super().__init__()
        self._watch = watch
        self._deferred: deque[tuple[str, Callable[..., object], tuple]] = deque()

    def call(self, phase: str, function: Callable[..., Any], *arguments: Any) -> Any:
        """Calls the function, counts its seconds as `phase`, and returns its result."""
        return self._watch.timing(phase, function)(*arguments)

    def later(self, phase: str, function: Callable[..., object], *arguments: Any) -> None:
        """Defers a call until the next `flush`."""
        self._deferred.append((phase, function, arguments))

    def flush(self) -> None:
        """Makes all deferred calls, including calls deferred during the flush. A failed call is not repeated."""
        while self._deferred:
            phase, function, arguments = self._deferred.popleft()
            self.call(phase, function, *arguments)
