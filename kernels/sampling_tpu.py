"""Statistics of the sampling law's tiles on TPU: a grid of 8 rows x 8 tiles, every logit read once.

Invariant: the same as that of the tile math (tiles.of_tile). Refuses shapes for which `serves` is False.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from jaxrl_post.kernels import tiles
from jaxrl_post.kernels.pallas_tpu import pl, pltpu

ROWS = 8
TILES = 8  # tiles of one block: 256 KiB of logits
LANES = 128
NEEDS = f"at least {tiles.TILE} ids a device"


sampled = tiles.sampled


def serves(rows: int, vocab: int) -> bool:
    return vocab >= tiles.TILE


def statistics(
    logits: Float[Array, "R V"], lowest: Float[Array, " R"], inverse: Float[Array, " R"], *, interpret: Any = False
) -> tiles.Statistics:
    """Returns the statistics of every tile, from float32 logits. `lowest` and `inverse` come from tiles.row_numbers."""
    rows, vocab = logits.shape
    num = -(-vocab // tiles.TILE)
    width = -(-num // LANES) * LANES
    out = pl.pallas_call(
        _kernel(vocab),
        grid=(-(-rows // ROWS), -(-num // TILES)),
        in_specs=[
            pl.BlockSpec((ROWS, TILES * tiles.TILE), lambda r, v: (r, v)),
            pl.BlockSpec((ROWS, 2), lambda r, v: (r, 0)),
        ],
        out_specs=pl.BlockSpec((4, ROWS, width), lambda r, v: (0, r, 0)),
        out_shape=jax.ShapeDtypeStruct((4, rows, width), jnp.float32),
        compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel", "arbitrary")),
        interpret=interpret,
    )(logits, jnp.stack([lowest, inverse], axis=1))
    return tiles.Statistics(*out[:, :, :num])


def _kernel(vocab: int):
    def kernel(logits_ref, rows_ref, out_ref):
        block = pl.program_id(1)

        @pl.when(block == 0)
        def _():
            out_ref[...] = jnp.zeros(out_ref.shape, jnp.float32)

        lowest, inverse = rows_ref[:, 0:1], rows_ref[:, 1:2]
        lane = jax.lax.broadcasted_iota(jnp.int32, out_ref.shape[1:], 1)
        column = jax.lax.broadcasted_iota(jnp.int32, (ROWS, tiles.TILE), 1)
        for place in range(TILES):
            tile = block * TILES + place
            logits = logits_ref[:, place * tiles.TILE : (place + 1) * tiles.TILE]
            found = tiles.of_tile(logits, column < vocab - tile * tiles.TILE, lowest, inverse)
            for index, number in enumerate(found):
                out_ref[index] = jnp.where(lane == tile, number, out_ref[index])

    return kernel
