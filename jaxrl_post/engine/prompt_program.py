"""The wide prompt program: keys and values of prompt positions, many rows at once, without heads or sampling.

A pass takes tiles of PROMPT_TILE rows (host/packing.py). Each row runs through the model and writes its KV entry.
A tile reads each page of its prompt once (kernels/prompt_attention.py).

Invariant: a generated position, and the last position of a prompt, belong to the row program. Where this program is
used, all other prompt positions belong to it. So every KV entry has one writer, and its bits do not depend on the pass.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int

from jaxrl_post.engine.host.wire import PROMPT_TILE, TILE_COUNT, TILE_FIRST, TILE_SLOT, TILE_TABLE
from jaxrl_post.engine.row_state import Program
from jaxrl_post.kernels import prompt_attention
from jaxrl_post.models import decoder
from jaxrl_post.parallel import mesh as meshes


def prefill(
    program: Program,
    params: Any,
    tokens: Int[Array, "replicas S T"],
    cache: tuple,
    tiles: Int[Array, "replicas tiles columns"],
) -> tuple:
    """Returns the cache with the keys and values of all tiles. cache: as in State."""
    run = jax.vmap(functools.partial(_pass, program), in_axes=(None, 0, 0, 0), spmd_axis_name=meshes.REPLICAS)
    return run(params, tokens, cache, tiles)


def _pass(program: Program, params: Any, tokens: Array, cache: tuple, tiles: Array) -> tuple:
    """Computes the tiles of one replica."""
    rows = prompt_attention.rows_of(tiles[:, TILE_FIRST], tiles[:, TILE_COUNT], tiles[:, TILE_TABLE:], PROMPT_TILE)
    inputs = jnp.where(rows.real, tokens[tiles[rows.slot, TILE_SLOT], rows.position], 0)

    attend = program.attending(rows, prompt_attention.attention)
    how = dict(dtype=program.dtype, routing=program.routing)
    _, cache = decoder.hidden(params, program.config, inputs, rows.position, attend, cache, **how)
    return cache
