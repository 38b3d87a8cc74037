"""What reward functions and environments tell a user: what they print, and how they fail.

What they print goes to one file of the run, of bounded size. Every process writes into a pipe, and a thread of the trainer
empties it, line after line. So a function that prints never waits for the ring, and what it prints cannot fill a disk. Each
distinct failure is shown once, with its place and its traceback.
"""

from __future__ import annotations

import io
import logging
import os
import threading
from pathlib import Path

_log = logging.getLogger(__name__)
MOST = 8 << 20  # bytes of the file
_LINE = 1 << 16  # bytes of a line; a longer one is written in parts


class Printed:
    """Appends lines to a file, which is made with the first one. Beyond `most` bytes it drops them, and says so once.

    So it does where the file cannot be written: a function that prints never fails or waits for that.
    """

    def __init__(self, path: str | Path, most: int = MOST):
        self._path, self._most = Path(path), most
        self._lock, self._full = threading.Lock(), False
        self._threads: list[threading.Thread] = []

    def opened(self) -> io.FileIO:
        """Returns the end of a new pipe that a process writes to. Its lines are read until all its writers are gone."""
        source, sink = os.pipe()
        self._threads = [thread for thread in self._threads if thread.is_alive()]
        self._threads.append(threading.Thread(target=self._read, args=(source,), name="rewards.log", daemon=True))
        self._threads[-1].start()
        return io.FileIO(sink, "wb")

    def settle(self, seconds: float = 1.0) -> None:
        """Waits until what was printed is written, at most `seconds` for each process that has ended."""
        for thread in self._threads:
            thread.join(seconds)

    def _read(self, source: int) -> None:
        with io.BufferedReader(io.FileIO(source)) as lines:
            while line := lines.readline(_LINE):
                self._write(line)

    def _write(self, line: bytes) -> None:
        with self._lock:
            if self._full:
                return
            try:
                with open(self._path, "ab") as file:
                    if file.tell() + len(line) > self._most:
                        self._full = True
                        line = f"... this file holds at most {self._most} bytes; what follows is dropped\n".encode()
                    file.write(line)
            except OSError as error:
                self._full = True
                _log.warning("%s cannot be written (%s): what reward functions print is dropped", self._path, error)


class Failures:
    """Shows the first failure of each kind: of a function, with one type of exception, at one line.

    Later ones are counted by the pool (`reward/exceptions`, `reward/retries`, `reward/unscored`). A trace is shown without its
    last line, which the sentence has.

    Args:
      what: whose failures they are.
      log: whether they go to the log. Without it they are in `told` alone, for a caller who says them.
    """

    def __init__(self, what: str = "reward function", *, log: bool = True):
        self._what, self._log = what, log
        self._seen: set[tuple[str, str, str]] = set()
        self.told: list[str] = []  # a sentence for each kind

    def tell(self, function: str, rollout: object, reason: str, place: str, trace: str) -> None:
        """Takes a failure. `place` and `trace` are empty where no exception tells them."""
        kind = reason.partition(":")[0] if place else reason
        where = f" at {place}" if place else ""
        if (function, kind, place) in self._seen:
            _log.info("%s %s failed%s on %s: %s", self._what, function, where, rollout, reason)
            return
        self._seen.add((function, kind, place))
        self.told.append(f"{self._what} {function!r} fails{where}: {reason}")
        if not self._log:
            return
        _log.warning(
            "%s %s failed%s on %s: %s; further failures like this one are counted, not shown%s",
            self._what,
            function,
            where,
            rollout,
            reason,
            f"\n{frames}" if (frames := trace.rstrip().removesuffix(reason).rstrip()) else "",
        )
