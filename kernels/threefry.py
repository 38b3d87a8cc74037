"""Threefry-2x32 (Salmon et al., SC 2011; 20 rounds) in plain 32-bit integer arithmetic, over numpy or jax.numpy.

Invariant: bits are equal on every backend, because it uses 32-bit add, xor and rotate only. It holds no state: the same
key and counter always give the same word.
"""

from __future__ import annotations

ROTATIONS = ((13, 15, 26, 6), (17, 29, 16, 24))
PARITY = 0x1BD11BDA


def first_word(xp, key0, key1, count0, count1):
    """Returns uint32: the first output word for key (key0, key1) and counter (count0, count1).

    All four are broadcastable uint32 arrays. `xp` is numpy or jax.numpy."""
    u32 = xp.uint32
    keys = (key0, key1, key0 ^ key1 ^ u32(PARITY))
    x0, x1 = count0 + keys[0], count1 + keys[1]
    for group in range(5):
        for turn in ROTATIONS[group % 2]:
            x0 = x0 + x1
            x1 = ((x1 << u32(turn)) | (x1 >> u32(32 - turn))) ^ x0
        x0 = x0 + keys[(group + 1) % 3]
        x1 = x1 + keys[(group + 2) % 3] + u32(group + 1)
    return x0
