"""Paged attention on TPU: jax's ragged paged attention (version 2), with every row as a sequence of its own.

Invariant: the same as the reference's (attention.py). It requires sequences of one row. With the rows of a slot as one
sequence, the kernel would read the slot's pages once. But the kernel divides its output by the mass after every block
of pages. A block that only later rows see would still round an earlier row's output, (mass * out) / mass. So a draft
could change a token. Refuses shapes for which `serves` is False.
"""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Float

from jaxrl_post.kernels.pallas_tpu import ragged_paged_attention

LANES = 128
BLOCK = 256  # positions that the kernel loads at once
ROWS = 8  # rows of one block of the kernel's grid
NEEDS = "bfloat16, heads of a multiple of 128, 1, 2, 4 or a multiple of 8 key heads, and pages of 8, 16, .. 256"
TABLE = 1 << 17  # entries of a page table that fit into scalar memory beside other data


def serves(dtype: Any, cached: Any, heads: int, kv_heads: int, head_dim: int, page: int) -> bool:
    """Returns whether the kernel takes these shapes."""
    tiled = kv_heads in (1, 2, 4, 8) or kv_heads % 8 == 0  # pairs of a key and a value head, packed in 32 bits
    return dtype == cached == jnp.bfloat16 and head_dim % LANES == 0 and page % 8 == 0 and page <= BLOCK and tiled


def attention(
    q: Float[Array, "R N H"],
    pages: Float[Array, "pages page KV H"],
    rows: Any,
    *,
    scale: float,
    window: int | None,
    soft_cap: float | None,
    kernel: Any = ragged_paged_attention.ragged_paged_attention,
) -> Float[Array, "R N H"]:
    """Returns attention.attention over the cache's pages. `kernel`: ragged_paged_attention, or a function with its
    arguments."""
    R, blocks = q.shape[0], rows.table.shape[1]
    size = max(1, TABLE // blocks)
    outs = []
    for begin in range(0, R, size):
        some = slice(begin, begin + size)
        slot, real = rows.slot[some], rows.real[some]
        num = slot.shape[0]
        length = jnp.where(real, rows.position[some] + 1, 1).astype(jnp.int32)
        table = jnp.clip(rows.table, 0, pages.shape[0] - 1).astype(jnp.int32)[slot]
        last = jnp.max(jnp.where(real, jnp.arange(num, dtype=jnp.int32), 0))
        out = kernel(
            (q[some] * scale).astype(q.dtype),
            pages,
            length,
            table,
            jnp.arange(num + 1, dtype=jnp.int32),
            last[None] + 1,
            sm_scale=1.0,
            sliding_window=window,
            soft_cap=soft_cap,
            num_kv_pages_per_block=min(blocks, BLOCK // pages.shape[1]),
            num_queries_per_block=min(ROWS, num),
        )
        outs.append(jnp.where(real[:, None, None], out, 0))
    return jnp.concatenate(outs)
