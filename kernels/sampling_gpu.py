"""Statistics of the sampling law's tiles on NVIDIA GPUs (Mosaic GPU, Hopper and later).

One warpgroup computes a row's group of tiles. Tiles are independent, so no program waits for another. Logits are
loaded into registers, eight a thread. Invariant: the same as that of the tile math (tiles.of_tile). Refuses shapes for
which `serves` is False.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

from jaxrl_post.kernels import tiles
from jaxrl_post.kernels.pallas_gpu import pl, plgpu

TILES = 8  # tiles of one program: 32 KiB of logits
ALIGNED = 4  # numbers of one 16-byte load
NEEDS = f"at least {tiles.TILE} ids a device, in a multiple of {ALIGNED}"


def serves(rows: int, vocab: int) -> bool:
    return vocab >= tiles.TILE and vocab % ALIGNED == 0


def statistics(
    logits: Float[Array, "R V"], lowest: Float[Array, " R"], inverse: Float[Array, " R"], *, interpret: Any = None
) -> tiles.Statistics:
    """Returns the statistics of every tile, from float32 logits. `lowest` and `inverse` come from tiles.row_numbers."""
    rows, vocab = logits.shape
    num = -(-vocab // tiles.TILE)
    out = jax.ShapeDtypeStruct((rows, num), jnp.float32)
    run = plgpu.kernel(
        _kernel(vocab, num),
        out_type=(out,) * 4,
        grid=(rows, -(-num // TILES)),
        grid_names=("row", "group"),
        compiler_params=plgpu.CompilerParams(lowering_semantics=plgpu.LoweringSemantics.Warpgroup),
        interpret=interpret,
    )
    return tiles.Statistics(*run(logits, lowest, inverse))


def _kernel(vocab: int, num: int):
    """Returns the kernel body for `vocab` ids in `num` tiles."""

    def kernel(logits_ref, lowest_ref, inverse_ref, *out_refs):
        row, first = lax.axis_index("row"), lax.axis_index("group") * TILES
        lowest, inverse = lowest_ref[row], inverse_ref[row]

        def begin(tile):
            """Returns the first id to load. A short last tile is loaded from further left, so that no load leaves the
            row."""
            return jnp.minimum(tile * tiles.TILE, vocab - tiles.TILE)

        def load(tile):
            return logits_ref[row, pl.ds(begin(tile), tiles.TILE)]

        def body(tile, logits):
            following = load(tile + 1)
            column = begin(tile) + lax.broadcasted_iota(jnp.int32, (tiles.TILE,), 0)
            found = tiles.of_tile(logits, column >= tile * tiles.TILE, lowest, inverse)
            for out_ref, number in zip(out_refs, found):
                out_ref[row, tile] = number[0]
            return following

        lax.fori_loop(first, jnp.minimum(first + TILES, num), body, load(first))

    return kernel
