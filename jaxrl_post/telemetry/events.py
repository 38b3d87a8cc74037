"""The ring's events: who is told what happens, where each call's seconds count, and host work deferred to a dispatch.

The loop tells every event in the order in which it happens. Listeners of one event are called in the order of their
registration. They measure a run and take no part in it: nothing that a listener does reaches a decision.

| event | told with | when |
|---|---|---|
| preparing | groups | before the learner prepares groups that it sees for the first time |
| accumulating | groups | before the learner accumulates gradients of groups |
| committed | metrics, part | after an optimizer step, with all parts since the step before as one |
| published | version | after the engine has taken new weights |
| launched | requests, clock, version | after the engine has taken requests; not told of none |
| stepping | clock | before a dispatch |
| stepped | finished rollouts, clock | after a dispatch |
| stopped | parked rollouts, clock, version | after rollouts left the engine unfinished; not told of none |
| scored | scored group | after the rewards of a group were joined, before the scheduler gets it |

`clock` counts engine steps. `version` is that of the weights in use.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any

from jaxrl_post.telemetry.timing import Stopwatch

EVENTS = ("preparing", "accumulating", "committed", "published", "launched", "stepping", "stepped", "stopped", "scored")


class Ring:
    """A protocols.Ring that calls everything at once and reads no clock."""

    def __init__(self) -> None:
        self._listeners: dict[str, list[Callable[..., object]]] = {event: [] for event in EVENTS}

    def on(self, event: str, *listeners: Callable[..., object]) -> None:
        """Registers listeners of an event, behind those already registered. KeyError: no such event."""
        self._listeners[event] += listeners

    def tell(self, event: str, *what: Any) -> None:
        """Calls every listener of an event."""
        for listener in self._listeners[event]:
            listener(*what)

    def call(self, phase: str, function: Callable[..., Any], *arguments: Any) -> Any:
        """Returns what the function returns."""
        return function(*arguments)

    def later(self, phase: str, function: Callable[..., object], *arguments: Any) -> None:
        """Calls the function at once."""
        self.call(phase, function, *arguments)

    def flush(self) -> None:
        """Does nothing: no call was deferred."""


class TimedRing(Ring):
    """A protocols.Ring that counts seconds by phase and defers host work until a dispatch is under way.

    Invariant: deferred calls run in the order in which they were deferred, and before anything that needs one of them.
    When they run follows from dispatches and calls alone, so a run with deferred work computes what one without does.
    """

    def __init__(self, watch: Stopwatch) -> None:
        super().__init__()
        self._watch = watch
        self._deferred: deque[tuple[str, Callable[..., object], tuple]] = deque()

    def call(self, phase: str, function: Callable[..., Any], *arguments: Any) -> Any:
        """Returns what the function returns; its seconds count as `phase`."""
        return self._watch.timing(phase, function)(*arguments)

    def later(self, phase: str, function: Callable[..., object], *arguments: Any) -> None:
        """Defers a call until the next `flush`."""
        self._deferred.append((phase, function, arguments))

    def flush(self) -> None:
        """Makes all deferred calls, also those deferred meanwhile. A call that fails is not repeated."""
        while self._deferred:
            phase, function, arguments = self._deferred.popleft()
            self.call(phase, function, *arguments)
