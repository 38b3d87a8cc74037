"""This process: how its warnings read, what memory it gives back, and that no thread of others keeps it alive.

It imports the standard library alone, because every command ends with it.

glibc serves a block from the system, and returns it when it is freed, only above a threshold that rises to 32 MiB as
such blocks are freed. A model's weights and moments then come out of arenas that never shrink, and a process on the CPU
holds more than its arrays and programs need. Smaller blocks, above all those of compiling and of writing a checkpoint,
are given back when `give_back` is called. Values never depend on it.
"""

from __future__ import annotations

import concurrent.futures.thread
import ctypes
import logging
import os
import sys
import threading
import time

LINGER_S = 10.0  # that such threads may still take once the program has ended
LARGE_BLOCK = 1 << 20  # bytes, below a layer's matrices; fixing the threshold stops it from rising
_MMAP_THRESHOLD = -3  # malloc.h, M_MMAP_THRESHOLD


def begun() -> None:
    """Lets warnings of this package be sentences, whatever format other libraries give to all loggers."""
    own, screen = logging.getLogger("jaxrl_post"), logging.StreamHandler()
    screen.setFormatter(logging.Formatter("warning: %(message)s"))
    screen.setLevel(logging.WARNING)
    own.addHandler(screen)
    own.propagate = False


def ended(code: int) -> int:
    """Returns the exit code of a program that has done its work, and lets no thread of others keep its process alive.

    After LINGER_S it names such threads and ends the process. Workers of executors are waited for: they finish what was begun.
    """

    def end() -> None:
        time.sleep(LINGER_S)
        workers = set(concurrent.futures.thread._threads_queues)
        rest = [one for one in threading.enumerate() if not one.daemon and one is not threading.main_thread()]
        if rest and not workers & set(rest):
            names = ", ".join(repr(one.name) for one in rest)
            print(
                f"the program has ended; its process ends too, though these threads still run: {names}", file=sys.stderr
            )
            for stream in (sys.stdout, sys.stderr):
                stream.flush()
            os._exit(code)

    threading.Thread(target=end, name="end of the program", daemon=True).start()
    return code


def return_large_blocks() -> bool:
    """Says whether the allocator has that setting and took it: glibc does, others do not need it."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    return mallopt is not None and mallopt(_MMAP_THRESHOLD, LARGE_BLOCK) == 1


def give_back() -> bool:
    """Returns to the system what is freed and still held; says whether the C library can."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    return trim is not None and trim(0) == 1
