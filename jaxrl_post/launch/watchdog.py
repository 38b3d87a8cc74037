"""Ends a run that hangs: a thread compares every call of the ring with a limit for its phase.

At a limit the process writes all its stacks, the scheduler's state and the trace, and ends with exit code 42, so that
--resume continues from the newest checkpoint. Time between two calls counts as the phase "host".

Invariant: the watchdog only measures. A limit decides whether a run goes on, never what it computes.
"""

from __future__ import annotations

import contextlib
import faulthandler
import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from jaxrl_post.launch import attempts
from jaxrl_post.launch.fault_points import CALLS
from jaxrl_post.telemetry.events import TimedRing
from jaxrl_post.telemetry.timing import Stopwatch

HOST = "host"
REPORT_S = 60.0  # seconds that a report of a hang may take
_POLL_S = 0.25


@contextlib.contextmanager
def leaving(code: int, why: str, limit_s: float = REPORT_S) -> Iterator[None]:
    """Ends the process with `code` after what happens inside, whatever it raises, and after `limit_s` at the latest.

    `why` is noted with the end of the attempt.

    What made the run hang, for example a lost disk, may hold up its report too.
    """
    timer = threading.Timer(limit_s, os._exit, (code,))
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        attempts.end(code, why)
        os._exit(code)


def write_stacks(file: Path, words: str) -> None:
    """Writes a line and the stacks of all threads."""
    with open(file, "w", encoding="utf-8") as out:
        out.write(f"{words}\n")
        out.flush()
        faulthandler.dump_traceback(out, all_threads=True)


class Watchdog:
    """Watches phases, which may be nested.

    Args:
      limits: seconds by phase. A phase without a limit has that of HOST. 0: no limit.
      compiling: seconds of every phase until `warm` is called, as programs are compiled until then.
      expired: called once, in the watchdog's thread, with (phase, seconds).
    """

    def __init__(
        self,
        limits: Mapping[str, float],
        compiling: float,
        expired: Callable[[str, float], object],
        now: Callable[[], float] = time.monotonic,
    ):
        self._limits, self._compiling, self._expired, self._now = limits, compiling, expired, now
        self._stack: list[tuple[str, float]] = [(HOST, now())]
        self._warm = threading.Event()
        self._ended = threading.Event()

    def __enter__(self) -> Watchdog:
        self._stack[0] = (HOST, self._now())
        threading.Thread(target=self._watch, name="watchdog", daemon=True).start()
        return self

    def __exit__(self, *error) -> None:
        self._ended.set()

    def warm(self) -> None:
        """Ends the time in which programs are compiled."""
        self._warm.set()

    @contextlib.contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Watches what happens inside."""
        self._stack.append((name, self._now()))
        try:
            yield
        finally:
            self._stack.pop()
            self._stack[0] = (HOST, self._now())

    def late(self) -> tuple[str, float] | None:
        """Returns the phase that is over its limit, and its seconds, or None."""
        now, stack = self._now(), list(self._stack)
        for name, begun in stack if len(stack) == 1 else stack[1:]:
            limit = self._limits.get(name, self._limits.get(HOST, 0.0)) if self._warm.is_set() else self._compiling
            if limit and now - begun > limit:
                return name, now - begun
        return None

    def _watch(self) -> None:
        while not self._ended.wait(_POLL_S):
            if (found := self.late()) is not None:
                self._expired(*found)
                return


class WatchedRing(TimedRing):
    """A TimedRing whose calls are watched, and reach the points of faults."""

    def __init__(self, watch: Stopwatch, dog: Watchdog, reach: Callable[[str], None]):
        super().__init__(watch)
        self._dog, self._reach = dog, reach

    def call(self, phase: str, function: Callable[..., Any], *arguments: Any) -> Any:
        """Calls the function within its phase, and returns its result."""
        with self._dog.phase(phase):
            if (point := CALLS.get((phase, getattr(function, "__name__", "")))) is not None:
                self._reach(point)
            return super().call(phase, function, *arguments)
