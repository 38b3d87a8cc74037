"""FLOPs and bytes of our kernels, as formulas of the shapes around them: what `traffic` asks where it sees a box.

Causal attention of packed rows walks pairs of blocks that are not above the diagonal. Segments are taken as whole rows,
the dearest case. A block of queries stays in the chip, so its arrays move once; the other side moves once for each pair.
Source of the walks: kernels/flash_gpu.py, and jax's splash_attention_kernel.py for the TPU.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from compiled_text import Array
from traffic import Kernel

LANES = 128
TPU_OWN, TPU_OTHER, GPU_BLOCK = 1024, 512, 64
PRODUCTS = {"forward": 2, "queries": 3, "keys": 4}  # of a pair of blocks


def pairs(tokens: int, own: int, other: int) -> int:
    """Returns the pairs of blocks, of `own` queries and `other` keys, that reach below the diagonal."""
    return sum(-(-min(end + own, tokens) // other) for end in range(0, tokens, own))


def _splash(walk: str) -> Kernel:
    def cost(given: Sequence[Array], made: Sequence[Array]) -> tuple[float, float]:
        many = [one for one in (*given, *made) if len(one.dims) >= 3 and one.dtype == "bf16"]
        heads, tokens, head = max(many, key=lambda one: one.bytes).dims[-3:]
        wide, size = math.gcd(tokens, TPU_OWN), math.gcd(tokens, TPU_OTHER)
        found, block = heads * pairs(tokens, wide, size), size * head * 2
        flops = PRODUCTS[walk] * 2.0 * wide * size * head * found
        own, ids = heads * tokens * head * 2, heads * tokens * LANES * 4
        if walk == "forward":  # queries and output once, keys and values for each pair; ids and masses fill lanes
            return flops, float(2 * own + 2 * block * found + 2 * ids)
        if walk == "queries":  # queries, slopes and result once, keys and values for each pair
            return flops, float(3 * own + 2 * block * found + ids)
        keys = given_keys(given, tokens, head) * tokens * head * 2
        return flops, float(4 * keys + 2 * block * found + found * size * 4 * 3)  # queries and slopes for each pair

    return cost


def given_keys(given: Sequence[Array], tokens: int, head: int) -> int:
    """Returns the number of key heads: the fewest heads among arrays [heads, tokens, head]."""
    return min(one.dims[-3] for one in given if len(one.dims) >= 3 and one.dims[-2:] == (tokens, head))


def _flash(walk: str) -> Kernel:
    def cost(given: Sequence[Array], made: Sequence[Array]) -> tuple[float, float]:
        (rows, tokens, heads, head), keys = given[0].dims, given[1].dims[2]
        found, block = rows * heads * pairs(tokens, GPU_BLOCK, GPU_BLOCK), GPU_BLOCK * head * given[0].dtype_bytes
        flops = PRODUCTS[walk] * 2.0 * GPU_BLOCK * GPU_BLOCK * head * found
        own, other = (rows * tokens * count * head * given[0].dtype_bytes for count in (heads, keys))
        once = {"forward": 2 * own, "queries": 3 * own, "keys": 4 * other}[walk]
        return flops, float(once + 2 * block * found)

    return cost


PACKED_ROWS: Mapping[str, Kernel] = {
    "splash_mha_fwd": _splash("forward"),
    "splash_mha_dq": _splash("queries"),
    "splash_mha_dkv": _splash("keys"),
    "flash_forward": _flash("forward"),
    "flash_backward_queries": _flash("queries"),
    "flash_backward_keys": _flash("keys"),
}
