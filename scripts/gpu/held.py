"""A section ends with the command that began it, also where the command is killed.

Otherwise it would hold the device, and share it with what the next call measures. The command holds one end of a pipe. A
section waits at the other end, in a thread, and ends its own group when nobody can write any more.
"""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from collections.abc import Iterator, MutableMapping

VARIABLE = "HELD_BY"  # names the section's end


@contextlib.contextmanager
def pipe() -> Iterator[int]:
    """Yields the end of a pipe that a section is to be given, by `pass_fds` and VARIABLE."""
    theirs, ours = os.pipe()
    try:
        yield theirs
    finally:
        os.close(theirs)
        os.close(ours)


def follow(environment: MutableMapping[str, str]) -> None:
    """From now on this process's group ends with the command, where there is one. The group must be its own."""
    if end := environment.pop(VARIABLE, ""):
        threading.Thread(target=_end_with, args=(int(end),), daemon=True).start()


def _end_with(end: int) -> None:
    os.read(end, 1)
    os.killpg(0, signal.SIGKILL)
