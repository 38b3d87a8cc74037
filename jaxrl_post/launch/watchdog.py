"""Ends a run that hangs: a thread compares every call of the ring with a limit for its phase.

At a limit the process writes all its stacks, the scheduler's state and the trace, and ends with exit code 42, so that
--resume continues from the newest checkpoint. Time between two calls counts as the phase "host".

Faults on purpose prove what a run survives: JAXRL_FAULT=POINT:COUNT[:KIND]. The COUNTth time that the run reaches POINT, it
is killed (SIGKILL), raises, hangs or gets a SIGTERM. Without the variable nothing happens. Points of a ring's call are
reached before the call.

Invariant: the watchdog only measures. A limit decides whether a run goes on, never what it computes.
"""

from __future__ import annotations

import contextlib
import difflib
import faulthandler
import os
import signal
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from jaxrl_post.ring.events import TimedRing
from jaxrl_post.ring.timing import Stopwatch
from jaxrl_post.runs import attempts

HOST = "host"
REPORT_S = 60.0  # seconds that a report of a hang may take
_POLL_S = 0.25
CALLS = {  # (phase, function) of a ring's call -> point
    ("gen", "step"): "dispatch",
    ("reward", "start"): "reward_start",
    ("reward", "join"): "reward_join",
    ("update_actor", "accumulate"): "accumulate",
    ("update_actor", "commit"): "commit",
    ("update_weights", "swap"): "swap",
}
POINTS = (*CALLS.values(), "publish", "before_save", "mid_save", "after_save", "prune", "evaluation")
KINDS = ("kill", "raise", "hang", "term")


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


class Planted(RuntimeError):
    """The fault that JAXRL_FAULT asked for."""


class FaultPoints:
    """Counts how often each point is reached.

    Args:
      environment: may hold JAXRL_FAULT.

    Raises:
      ValueError: the variable is malformed, or names an unknown point or kind.
    """

    def __init__(self, environment: Mapping[str, str]):
        self._at, self._count, self._kind = _fault(environment.get("JAXRL_FAULT", ""))
        self._reached: Counter[str] = Counter()

    def reach(self, point: str) -> None:
        """Does what the variable says, if this is the point and the count.

        Raises:
          Planted: the kind is "raise".
        """
        if point != self._at:
            return
        self._reached[point] += 1
        if self._reached[point] != self._count:
            return
        if self._kind == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        if self._kind == "raise":
            raise Planted(f"JAXRL_FAULT: {point} is reached for the {self._count}. time")
        if self._kind == "term":
            os.kill(os.getpid(), signal.SIGTERM)
        while self._kind == "hang":
            time.sleep(1.0)


def _fault(text: str) -> tuple[str, int, str]:
    if not text:
        return "", 0, ""
    point, _, rest = text.partition(":")
    count, _, kind = rest.partition(":")
    for given, known in ((point, POINTS), (kind or "kill", KINDS)):
        if given not in known:
            near = difflib.get_close_matches(given, known, n=1, cutoff=0.0)[0]
            raise ValueError(f"JAXRL_FAULT={text}: unknown {given!r}; nearest is {near!r}, all are {', '.join(known)}")
    if not count.isdecimal() or int(count) < 1:
        raise ValueError(f"JAXRL_FAULT={text}: the count {count!r} must be a number from 1 on, as in {point}:1")
    return point, int(count), kind or "kill"
