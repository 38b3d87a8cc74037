"""Tiles of rows: what the kernels of paged attention cut the rows of a program into.

A tile holds consecutive rows of one slot, so it reads each page of the slot once. The last tile of a slot may hold
fewer rows than the others. Tiles are in the order of their rows, and idle tiles come last.
"""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Int

from jaxrl_post.kernels import pairs

MANY = 2048  # rows, above which pairs of them cost more than a scan's kernels


def most(rows: Any, size: int) -> int:
    """Returns the most tiles of `size` rows that R rows can need. The last tile of every slot may be partly filled."""
    R, S = rows.slot.shape[0], rows.table.shape[0]
    return min(R, S + R // size)


def of(rows: Any, size: int) -> Int[Array, "tiles 4"]:
    """Returns, for each tile: slot, first row, number of rows (0: an idle tile), position of the first row."""
    return joined(size, most(rows, size), (rows.slot, rows.position, rows.real))


def joined(size: int, most: int, rows: tuple[Array, Array, Array]) -> Int[Array, "tiles 4"]:
    """Returns what `of` does, from slot, position and whether a row is real. A function for kernels/small_arrays.py."""
    (slot, position, real), row = rows, jnp.arange(rows[0].shape[0], dtype=jnp.int32)
    opens = real & (_rank(slot, real) % size == 0)
    # Of a row's tile, from 1 on. Rows that are not real have none.
    number = jnp.where(real, _running(opens.astype(jnp.int32)), 0)
    tile = jnp.arange(most, dtype=jnp.int32) + 1

    def of_tile(values: Array) -> Array:
        return pairs.sums(jnp, lambda tile, own, value: jnp.where(own == tile, value, 0), (tile,), (number, values))

    columns = *(jnp.where(opens, x, 0) for x in (slot, row)), real.astype(jnp.int32), jnp.where(opens, position, 0)
    place = jnp.arange(len(columns))
    return sum(jnp.where(place == at, of_tile(x)[:, None], 0) for at, x in enumerate(columns))


def _rank(slot: Int[Array, " R"], real: Bool[Array, " R"]) -> Int[Array, " R"]:
    """Returns the place of each row among the rows of its slot, of which real ones come first."""
    row = jnp.arange(slot.shape[0], dtype=jnp.int32)
    if slot.shape[0] > MANY:
        follows = (slot[1:] == slot[:-1]) & real[:-1]
        first = real & ~jnp.concatenate([jnp.zeros(1, bool), follows])
        return row - lax.cummax(jnp.where(first, row, 0))

    def before(row: Array, mine: Array, at: Array, slot: Array, there: Array) -> Array:
        return jnp.where((at < row) & (slot == mine), there, 0)

    return pairs.sums(jnp, before, (row, slot), (row, slot, real.astype(jnp.int32)))


def _running(values: Int[Array, " R"]) -> Int[Array, " R"]:
    """Returns the sum of the values up to each of them. Many values are scanned."""
    return jnp.cumsum(values) if values.shape[0] > MANY else pairs.running(jnp, values)
