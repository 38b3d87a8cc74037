"""SIGTERM and SIGINT end a run in time, with an exit code that says: resume me.

After a signal the run goes on to its next publish, but for at most PATIENCE_S seconds of further dispatches. At a
publish with no rollout in the engine an extra checkpoint changes no bit, so one is saved there. Elsewhere the newest
checkpoint counts. While the run starts or ends, a signal ends it where it is. If a run has not ended after LIMIT_S
seconds, because it waits for a device or evaluates, the process exits where it is. A second signal ends it at once.
A launcher that grants a longer grace period says so in the variable GRANTED, and the limit is then MARGIN_S shorter.

Invariant: a signal decides where a run stops, never what it computes. The resumed run ends as an undisturbed one.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping

import jax

from jaxrl_post.launch.watchdog import leaving
from jaxrl_post.parallel.exchange import broadcast_text
from jaxrl_post.parallel.liveness import RESTART as RESTART  # exported here too

PATIENCE_S, LIMIT_S = 12.0, 18.0
GRANTED, MARGIN_S = "JAXRL_GRACE_S", 4.0
_NOTE_S = 2.0  # for the end to be noted
SIGNALS = (signal.SIGTERM, signal.SIGINT)
_resumed_from: list[str] = []  # the folder of the run, once there is one
_readers: list[float] = []  # the limit of the thread that reads signals, while there is one


class Stopped(BaseException):
    """A signal ended the run. --resume continues it. No library shall take it for an error of its own."""


def limit(environment: Mapping[str, str]) -> float:
    """Returns the seconds after a signal at which the process exits wherever it is.

    Raises:
      ValueError: the granted seconds are no number, or too few for a run to end in.
    """
    granted = environment.get(GRANTED, "")
    if not granted:
        return LIMIT_S
    if not granted.isdecimal() or int(granted) < LIMIT_S + MARGIN_S:
        raise ValueError(
            f"environment: {GRANTED}={granted[:40]!r} must be a whole number of seconds, at least {LIMIT_S + MARGIN_S:g}"
        )
    return int(granted) - MARGIN_S


def resumed_from(folder: str) -> None:
    """Says which folder resumes the run, for the lines that follow a signal."""
    _resumed_from[:] = [folder]


def _resume() -> str:
    return f"--resume={_resumed_from[0]}" if _resumed_from else "--resume"


def _announce(name: str) -> None:
    """Says at once what a signal does, since the end may take a while."""
    within = f", within {_readers[0]:g} s" if _readers else ""
    if _resumed_from:
        what = f"the run ends at its next publish or dispatch{within}; a second signal ends it at once; {_resume()} continues it"
    else:
        what = f"the start ends{within}; no run has begun"
    with contextlib.suppress(RuntimeError):  # a handler may have interrupted another line
        print(f"{name}: {what}", file=sys.stderr, flush=True)


@contextlib.contextmanager
def heard(limit_s: float = LIMIT_S) -> Iterator[None]:
    """Obeys signals from here on, in the main thread only. Where no StopSignal listens, a signal raises Stopped.

    The main thread handles no signal while it waits for a device. So another thread reads them, and counts the seconds.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    over, (read, write) = threading.Event(), os.pipe()
    os.set_blocking(write, False)
    before = {number: signal.signal(number, _leave) for number in SIGNALS}
    pipe_before = signal.set_wakeup_fd(write, warn_on_full_buffer=False)
    reader = threading.Thread(target=_count, args=(read, over, limit_s), name="signals", daemon=True)
    _readers.append(limit_s)
    reader.start()
    try:
        yield
    finally:
        _readers.clear()
        _resumed_from.clear()
        signal.set_wakeup_fd(pipe_before)
        for number, handler in before.items():
            signal.signal(number, handler)
        over.set()
        os.write(write, b"\0")
        reader.join()
        os.close(write)
        os.close(read)


def _leave(number: int, frame) -> None:
    _default()
    raise Stopped(f"{signal.Signals(number).name}: stopped outside of a step; {_resume()} begins there again")


def _default() -> None:
    """Lets a second signal end the process at once."""
    for one in SIGNALS:
        signal.signal(one, signal.SIG_DFL)


def _count(read: int, over: threading.Event, limit_s: float) -> None:
    """Exits the process `limit_s` seconds after its first signal, unless the run is over by then."""
    came: set[int] = set()
    while not over.is_set() and not came:
        came = set(os.read(read, 64)) & set(SIGNALS)
    if came:
        _announce(signal.Signals(min(came)).name)
    if not over.wait(limit_s):
        why = f"stopped where it was, {limit_s:g} s after a signal"
        with leaving(RESTART, why, limit_s=_NOTE_S):
            print(
                f"{why}; {_resume()} continues from the newest checkpoint, else from the start",
                file=sys.stderr,
                flush=True,
            )


class StopSignal:
    """Notices signals from `__enter__` to `__exit__`, in the main thread only, and listens to the ring.

    Args:
      save: saves a checkpoint of a version, unless there is one. It returns whether the version is saved.
      may_save: whether the run saves checkpoints, and no rollout is in the engine.
      last: the version that ends the run, at which a signal has nothing to stop.
    """

    def __init__(self, save: Callable[[int], bool], may_save: Callable[[], bool], last: int):
        self._save, self._may_save, self._last = save, may_save, last
        self._name, self._since = "", 0.0
        self._before: dict = {}

    def __enter__(self) -> StopSignal:
        if threading.current_thread() is threading.main_thread():
            self._before = {number: signal.signal(number, self._notice) for number in SIGNALS}
        return self

    def __exit__(self, *error) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _notice(self, number: int, frame) -> None:
        self._name, self._since = signal.Signals(number).name, time.monotonic()
        if not _readers:
            _announce(self._name)
        for one, before in self._before.items():  # a second signal ends a command at once, and interrupts a program
            signal.signal(one, before if before is signal.default_int_handler else signal.SIG_DFL)

    def stepped(self, *_) -> None:
        """Listens to `stepped`. A job of several processes stops at publishes alone, where all of them agree.

        Raises:
          Stopped: a signal came more than PATIENCE_S seconds ago.
        """
        if self._name and jax.process_count() == 1 and time.monotonic() - self._since > PATIENCE_S:
            raise Stopped(f"{self._name}: stopped after a dispatch; {_resume()} continues from the newest checkpoint")

    def published(self, version: int) -> None:
        """Listens to `published`, after everything else.

        Raises:
          Stopped: a signal came to process 0.
        """
        name = self._name if jax.process_count() == 1 else broadcast_text(self._name)
        if not name or version >= self._last:
            return
        if self._may_save() and self._save(version):
            raise Stopped(f"{name}: stopped after step {version}, which is saved; {_resume()} continues from there")
        raise Stopped(f"{name}: stopped after step {version}; {_resume()} continues from the newest checkpoint")
