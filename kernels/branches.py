"""Texts of packed rows that share their beginnings: which token sees which, and which blocks of tokens meet.

A row holds each shared beginning once, and behind it everything that continues it, one continuation after another. So
the tokens that see a token stand in one stretch, from itself to `until`. Texts that share nothing are the simplest case.
"""

from __future__ import annotations

from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Bool, Int


class Branches(NamedTuple):
    """Of every token of packed rows:

    - until: the place in the row behind the last token that sees it
    - positions: its place in its own text
    """

    until: Int[Array, "B T"]
    positions: Int[Array, "B T"]


def sees(own: Array, until: Array, behind: Array | None, window: int | None) -> Array:
    """Returns whether queries at places `own` see keys that stand at or before them.

    Args:
      until: of the keys.
      behind: the position of the query less that of the key; not read without a window.
      window: a query sees its own position and the window - 1 before it in its text.
    """
    inside = own < until
    return inside if window is None else inside & (behind < window)


class Visits(NamedTuple):
    """For each block of one side, the blocks of the other side that it must meet, in rising order.

    - numbers: of these blocks; behind the last one it stands again
    - counts: how many they are, at least one
    """

    numbers: Int[Array, "B own other"]
    counts: Int[Array, "B own"]


def visits(branches: Branches, queries: int, keys: int, window: int | None) -> tuple[Visits, Visits]:
    """Returns what each block of queries meets, and what each block of keys meets. Sizes of blocks must divide T.

    Without a window every block that is met holds a pair that sees each other.
    """
    B, T = branches.until.shape
    first_query, first_key = (jnp.arange(0, T, size)[:, None] for size in (queries, keys))
    farthest = jnp.max(branches.until.reshape(B, -1, keys), axis=-1)
    meets = (first_query + queries > first_key.T) & (farthest[:, None, :] > first_query)
    if window is not None:
        nearest = jnp.min(branches.positions.reshape(B, -1, queries), axis=-1)
        latest = jnp.max(branches.positions.reshape(B, -1, keys), axis=-1)
        meets &= nearest[:, :, None] - latest[:, None, :] < window
    return _listed(meets), _listed(jnp.swapaxes(meets, 1, 2))


def _listed(meets: Bool[Array, "B own other"]) -> Visits:
    counts = jnp.sum(meets, axis=-1, dtype=jnp.int32)
    order = jnp.argsort(~meets, axis=-1, stable=True).astype(jnp.int32)
    upto = jnp.minimum(jnp.arange(meets.shape[-1]), counts[..., None] - 1)
    return Visits(jnp.take_along_axis(order, upto, axis=-1), counts)
