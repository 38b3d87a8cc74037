"""Tiles of rows: what the kernels of paged attention cut the rows of a program into.

A tile holds consecutive rows of one slot, so it reads each page of the slot once. The last tile of a slot may hold
fewer rows than the others. Tiles are in the order of their rows, and idle tiles come last.
"""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Int


def most(rows: Any, size: int) -> int:
    """Returns the most tiles of `size` rows that R rows can need. The last tile of every slot may be partly filled."""
    R, S = rows.slot.shape[0], rows.table.shape[0]
    return min(R, S + R // size)


def of(rows: Any, size: int) -> Int[Array, "tiles 4"]:
    """Returns, for each tile: slot, first row, number of rows (0: an idle tile), position of the first row."""
    R, tiles = rows.slot.shape[0], most(rows, size)
    row = jnp.arange(R, dtype=jnp.int32)
    follows = (rows.slot[1:] == rows.slot[:-1]) & rows.real[:-1]
    first = rows.real & ~jnp.concatenate([jnp.zeros(1, bool), follows])
    rank = row - lax.cummax(jnp.where(first, row, 0))
    opens = rows.real & (rank % size == 0)
    tile = jnp.cumsum(opens) - 1
    head = jnp.where(opens, tile, tiles)
    count = jnp.zeros(tiles, jnp.int32).at[jnp.where(rows.real, tile, tiles)].add(1, mode="drop")
    slot, start, position = (
        jnp.zeros(tiles, jnp.int32).at[head].set(x.astype(jnp.int32), mode="drop")
        for x in (rows.slot, row, rows.position)
    )
    return jnp.stack([slot, start, count, position], axis=-1)
