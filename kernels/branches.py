"""Texts of packed rows that share their beginnings: which token sees which, and which blocks of tokens meet.

A row holds each shared beginning once, and behind it everything that continues it, one continuation after another. So
the tokens that see a token stand in one stretch, from itself to `until`. Texts that share nothing are the simplest case.
"""

from __future__ import annotations

from typing import NamedTuple

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Int


class Standing(NamedTuple):
    """Where tokens stand: their places in the row, and their positions, each in its own text."""

    places: Int[Array, "B T"]
    positions: Int[Array, "B T"]

    def first_places(self, size: int) -> Int[Array, "B blocks"]:
        """Returns the place of each block's first token. The others of a block must follow it in the row."""
        return self.places[:, ::size]


class Branches(NamedTuple):
    """The keys of rows, and the queries where a device has others: a part of them, say.

    - until: the place in the row behind the last token that sees each key
    - keys: where they stand
    - own: where queries stand; None: they are the tokens of the keys
    """

    until: Int[Array, "B keys"]
    keys: Standing
    own: Standing | None = None

    @property
    def queries(self) -> Standing:
        return self.own or self.keys

    @property
    def stretch(self) -> int:
        """Returns how many tokens follow each other in the row, on both sides: all, or half of a part (parallel/row_pieces.py)."""
        return self.until.shape[1] if self.own is None else self.own.places.shape[1] // 2


def of_rows(until: Int[Array, "B T"], positions: Int[Array, "B T"]) -> Branches:
    """Returns the branches of whole rows."""
    places = jnp.broadcast_to(jnp.arange(until.shape[1], dtype=jnp.int32), until.shape)
    return Branches(until, Standing(places, positions))


def of_segments(segment_ids: Int[Array, "B T"], positions: Int[Array, "B T"]) -> Branches:
    """Returns the branches of rows whose texts share nothing."""
    T = segment_ids.shape[1]
    ends = jnp.pad(segment_ids[:, 1:] != segment_ids[:, :-1], ((0, 0), (0, 1)), constant_values=True)
    until = lax.cummin(jnp.where(ends, jnp.arange(1, T + 1, dtype=jnp.int32), T), axis=1, reverse=True)
    return of_rows(until, positions)


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
    - counts: how many they are. A block of keys may meet none where queries are a part of the row.
    """

    numbers: Int[Array, "B own other"]
    counts: Int[Array, "B own"]


def visits(branches: Branches, queries: int, keys: int, window: int | None) -> tuple[Visits, Visits]:
    """Returns what each block of queries meets, and what each block of keys meets. Sizes of blocks must divide those of sides.

    Without a window every block that is met holds a pair that sees each other.
    """
    B, own, other = len(branches.until), branches.queries, branches.keys
    first_query, first_key = own.first_places(queries)[:, :, None], other.first_places(keys)[:, None, :]
    farthest = jnp.max(branches.until.reshape(B, -1, keys), axis=-1)[:, None, :]
    meets = (first_query + queries > first_key) & (farthest > first_query)
    if window is not None:
        nearest = jnp.min(own.positions.reshape(B, -1, queries), axis=-1)
        latest = jnp.max(other.positions.reshape(B, -1, keys), axis=-1)
        meets &= nearest[:, :, None] - latest[:, None, :] < window
    return _listed(meets), _listed(jnp.swapaxes(meets, 1, 2))


def _listed(meets: Bool[Array, "B own other"]) -> Visits:
    counts = jnp.sum(meets, axis=-1, dtype=jnp.int32)
    size = meets.shape[-1]
    places = jnp.arange(size, dtype=jnp.int32)
    order = jnp.sort(jnp.where(meets, places, places + size), axis=-1) % size  # those that are met come first
    upto = jnp.minimum(places, jnp.maximum(counts[..., None] - 1, 0))
    return Visits(jnp.take_along_axis(order, upto, axis=-1), counts)
