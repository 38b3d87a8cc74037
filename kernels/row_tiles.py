"""Tiles of rows: what the kernels of paged attention cut the rows of a program into.

A tile holds consecutive rows of one slot, so it reads each page of the slot once. The last tile of a slot may hold
fewer rows than the others. Tiles are in the order of their rows, and idle tiles come last.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Int

MANY = 2048  # rows, above which pairs of them cost more than a scan's kernels


def most(rows: Any, size: int) -> int:
    """Returns the most tiles of `size` rows that R rows can need. The last tile of every slot may be partly filled."""
    R, S = rows.slot.shape[0], rows.table.shape[0]
    return min(R, S + R // size)


def of(rows: Any, size: int) -> Int[Array, "tiles 4"]:
    """Returns, for each tile: slot, first row, number of rows (0: an idle tile), position of the first row."""
    row, tile = (jnp.arange(n, dtype=jnp.int32) for n in (rows.slot.shape[0], most(rows, size)))
    follows = (rows.slot[1:] == rows.slot[:-1]) & rows.real[:-1]
    first = rows.real & ~jnp.concatenate([jnp.zeros(1, bool), follows])
    opens = rows.real & ((row - _running(jnp.max, jnp.where(first, row, 0))) % size == 0)
    number = _running(jnp.sum, opens.astype(jnp.int32))  # of a row's tile, from 1 on
    mine = (number == tile[:, None] + 1) & rows.real
    count, start = jnp.sum(mine, axis=1, dtype=jnp.int32), jnp.argmax(mine, axis=1).astype(jnp.int32)
    there = count > 0
    columns = (rows.slot[start], start, count, rows.position[start])
    return jnp.stack([jnp.where(there, x.astype(jnp.int32), 0) for x in columns], axis=-1)


def _running(join: Callable, values: Int[Array, " R"]) -> Int[Array, " R"]:
    """Returns `join`, jnp.max or jnp.sum, of the values up to each of them. None is below 0.

    Few values are joined over a mask of all pairs: a scan would be small kernels of its own, in every step."""
    if values.shape[0] > MANY:
        return (lax.cummax if join is jnp.max else jnp.cumsum)(values)
    at = jnp.arange(values.shape[0])
    return join(jnp.where(at[None, :] <= at[:, None], values[None, :], 0), axis=1).astype(values.dtype)
