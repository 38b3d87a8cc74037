"""What reward functions print, in one file of the run: their output and their errors, of bounded size.

Every process writes into a pipe, and a thread of the trainer empties it, line after line. So a function that prints
never waits for the ring, and what it prints cannot fill a disk.
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
