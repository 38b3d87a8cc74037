"""Tiles of rows against tiles written by hand."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl_post.kernels import attention, row_tiles


def rows_of(*counts: tuple[int, int, int]) -> attention.Rows:
    """Returns rows of (slot, first position, rows)."""
    where = [(slot, first + at) for slot, first, count in counts for at in range(count)]
    slot, position = (jnp.array(column, jnp.int32) for column in zip(*where, strict=True))
    return attention.Rows(slot, position, jnp.ones(len(where), bool), jnp.zeros((4, 2), jnp.int32))


def test_tiles_hold_every_real_row_once():
    tiles = np.asarray(row_tiles.of(rows_of((0, 5, 1), (1, 7, 11), (3, 60, 8)), 4))
    want = [[0, 0, 1, 5], [1, 1, 4, 7], [1, 5, 4, 11], [1, 9, 3, 15], [3, 12, 4, 60], [3, 16, 4, 64]]
    assert tiles[:6].tolist() == want and not tiles[6:, 2].any()


@pytest.mark.parametrize("size, want", [(1, 20), (4, 9), (64, 4)])
def test_there_are_tiles_for_the_worst_case(size, want):
    assert row_tiles.most(rows_of((0, 0, 20)), size) == want
