"""The C library's allocator, told to give freed memory back.

glibc serves a block from the system, and returns it when it is freed, only above a threshold that rises to 32 MiB as
such blocks are freed. A model's weights and moments then come out of arenas that never shrink, and a process on the CPU
holds more than its arrays and programs need. Smaller blocks, above all those of compiling and of writing a checkpoint,
are given back when `give_back` is called. Values never depend on it.
"""

from __future__ import annotations

import ctypes

LARGE = 1 << 20  # bytes, below a layer's matrices; fixing the threshold stops it from rising
_MMAP_THRESHOLD = -3  # malloc.h, M_MMAP_THRESHOLD


def return_large_blocks() -> bool:
    """Says whether the allocator has that setting and took it: glibc does, others do not need it."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    return mallopt is not None and mallopt(_MMAP_THRESHOLD, LARGE) == 1


def give_back() -> bool:
    """Returns to the system what is freed and still held; says whether the C library can."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    return trim is not None and trim(0) == 1
