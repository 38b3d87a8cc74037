"""Reads malformed inputs of one kind in this process and says on its standard output how each one ended.

    python scripts/fuzz/child.py KIND SEED FIRST COUNT

It writes one line of JSON before a case and one after it, so that a reader knows the case that ended the process.
A case may take 10 s, and 1 GiB of address space above what the process has after a valid input.
"""

from __future__ import annotations

import json
import os
import random
import resource
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from pathlib import Path

BYTES = 1 << 30


class Hang(BaseException):
    """A case took longer than it may."""


def tried(action: Callable[[], object], own: Callable[[BaseException], bool], seconds: float) -> tuple[str, str]:
    """Runs an action and returns its outcome and what was said."""
    from fuzz.kind import Outcome

    signal.setitimer(signal.ITIMER_REAL, seconds)
    with Outcome() as outcome:
        action()
    signal.setitimer(signal.ITIMER_REAL, 0)
    error = outcome.error
    if error is None:
        return "accepted", ""
    if isinstance(error, Hang):
        return "HANG", "".join(traceback.format_tb(error.__traceback__)[-3:])
    if isinstance(error, MemoryError):
        return "MEMORY", "".join(traceback.format_tb(error.__traceback__)[-2:])
    if own(error):
        return "refused", str(error)
    return (
        "TRACEBACK",
        f"{type(error).__name__}: {str(error)[:300]} {''.join(traceback.format_tb(error.__traceback__)[-2:])}",
    )


def memory() -> tuple[int, int]:
    """Returns the address space of this process and the most that it has held, in bytes."""
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    return pages * resource.getpagesize(), 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def main(kind: str, seed: int, first: int, count: int) -> None:
    from fuzz import KINDS

    say = os.fdopen(os.dup(1), "w", buffering=1, encoding="utf-8", errors="backslashreplace")
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    with tempfile.TemporaryDirectory(prefix="fuzz") as folder:
        inputs = KINDS[kind](Path(folder))
        inputs.valid()
        space, held = memory()
        if inputs.bounded:
            resource.setrlimit(resource.RLIMIT_AS, (space + BYTES, space + BYTES))

        def late(number, frame):
            raise Hang

        signal.signal(signal.SIGALRM, late)
        for index in range(first, first + count):
            what, action = inputs.case(index, random.Random(f"{kind}/{seed}/{index}"))
            say.write(json.dumps({"index": index, "what": what}) + "\n")
            began = time.monotonic()
            outcome, said = tried(action, inputs.refuses, inputs.seconds)
            now = memory()[1]
            row = {"index": index, "what": what, "outcome": outcome, "said": said}
            say.write(json.dumps(row | {"seconds": time.monotonic() - began, "grown": now - held}) + "\n")
            held = max(held, now)


if __name__ == "__main__":
    sys.path[:0] = [str(Path(__file__).resolve().parents[1]), str(Path(__file__).resolve().parents[2])]
    main(sys.argv[1], *map(int, sys.argv[2:5]))
