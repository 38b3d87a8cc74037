"""The wide prompt program: what layers keep of prompt positions, many rows at once, without heads or sampling.

A pass takes tiles of PROMPT_TILE rows (host/packing.py). Each row runs through the model and writes its KV entry.
A tile reads each page of its prompt once (kernels/prompt_attention.py). In layers with a recurrent state the rows of each
prompt move its slot's state, as they do in the row program (recurrent_rows.py).

Invariant: a generated position, and the last position of a prompt, belong to the row program. Where this program is
used, all other prompt positions belong to it. So every KV entry has one writer, and its bits do not depend on the pass.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int

from jaxrl_post.engine import recurrent_rows
from jaxrl_post.engine.host.wire import PROMPT_TILE, TILE_COUNT, TILE_FIRST, TILE_SLOT, TILE_TABLE
from jaxrl_post.engine.row_state import Program
from jaxrl_post.kernels import prompt_attention, recurrent_tpu
from jaxrl_post.models import decoder
from jaxrl_post.parallel import mesh as meshes

PIECE = recurrent_tpu.MOST_ROWS  # rows of a pass, at most, that move states at once


def prefill(
    program: Program,
    params: Any,
    tokens: Int[Array, "replicas S T"],
    cache: tuple,
    tiles: Int[Array, "replicas tiles columns"],
) -> tuple:
    """Returns the cache behind the rows of all tiles. cache: as in State."""
    run = jax.vmap(functools.partial(_pass, program), in_axes=(None, 0, 0, 0), spmd_axis_name=meshes.REPLICAS)
    return run(params, tokens, cache, tiles)


def _pass(program: Program, params: Any, tokens: Array, cache: tuple, tiles: Array) -> tuple:
    """Computes the tiles of one replica."""
    rows = prompt_attention.rows_of(tiles[:, TILE_FIRST], tiles[:, TILE_COUNT], tiles[:, TILE_TABLE:], PROMPT_TILE)
    inputs = jnp.where(rows.real, tokens[tiles[rows.slot, TILE_SLOT], rows.position], 0)

    attend = program.attending(rows, prompt_attention.attention)
    how = dict(dtype=program.dtype, routing=program.routing, recur=_recurring(program, tiles, len(tokens)))
    _, cache = decoder.hidden(params, program.config, inputs, rows.position, attend, cache, **how)
    return cache


def _recurring(program: Program, tiles: Array, slots: int) -> Callable:
    """Returns the decoder's `recur`. Pieces of the pass move the states one after another."""
    count = next(n for n in range(1, len(tiles) + 1) if len(tiles) % n == 0 and len(tiles) // n * PROMPT_TILE <= PIECE)

    def recur(layer, inputs, g, beta, weights, cache):
        def of_piece(cache, piece):
            tiles, *given = piece
            slot = jnp.repeat(tiles[:, TILE_SLOT], PROMPT_TILE)
            out, cache = program.recurring(rows_of_tiles(tiles, slots), slot)(layer, *given, weights, cache)
            return cache, out

        pieces = jax.tree.map(lambda x: x.reshape(count, -1, *x.shape[1:]), (tiles, inputs, g, beta))
        cache, out = jax.lax.scan(of_piece, cache, pieces)
        return out.reshape(-1, *out.shape[2:]), cache

    return recur


def rows_of_tiles(tiles: Int[Array, "tiles columns"], slots: int) -> recurrent_rows.SlotRows:
    """Returns the rows of tiles by slot, all of them settled. Tiles of a prompt follow one another. All but its last are full."""
    counts = tiles[:, TILE_COUNT]
    slot = jnp.where(counts > 0, tiles[:, TILE_SLOT], slots)
    number = jnp.zeros(slots, jnp.int32).at[slot].add(counts, mode="drop")

    def least(values: Array) -> Array:
        """Returns the lowest value of each slot's tiles, and 0 without any."""
        found = jnp.full(slots, jnp.iinfo(jnp.int32).max).at[slot].min(values, mode="drop")
        return jnp.where(number > 0, found, 0)

    first = least(PROMPT_TILE * jnp.arange(len(tiles), dtype=jnp.int32))
    return recurrent_rows.SlotRows(first, least(tiles[:, TILE_FIRST]), number, number)
