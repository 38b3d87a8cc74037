"""The sampling law on NVIDIA GPUs: statistics of its tiles (Mosaic GPU, Hopper and later), and samples (Pallas-Triton).

One warpgroup computes a row's group of tiles. Tiles are independent, so no program waits for another. Logits are
loaded into registers, eight a thread. Then one program samples for each row, where XLA needs a kernel for every sum.
Invariant: the same as that of the tile math (tiles.py). Refuses shapes for which `serves` is False.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int, UInt32

from jaxrl_post.kernels import sampling, tiles
from jaxrl_post.kernels.pallas_gpu import pl, plgpu
from jaxrl_post.kernels.pallas_triton import triton

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


def sampled(
    logits: Float[Array, "R V"],
    found: tiles.Statistics,
    seeds: UInt32[Array, "R 2"],
    positions: Int[Array, " R"],
    temperatures: Float[Array, " R"],
    thresholds: Float[Array, " R"] | None,
    given: Int[Array, " R"] | None = None,
    *,
    interpret: bool = False,
) -> sampling.Drawn:
    """Returns tiles.sampled, by one kernel."""
    rows, num = found.peak.shape
    more = [x for x in (thresholds, given) if x is not None]

    def kernel(*refs: Any) -> None:
        ins, outs = refs[: -len(sampling.Drawn._fields)], refs[-len(sampling.Drawn._fields) :]
        logits_ref, *found_refs, seeds_ref, at_ref, heat_ref = ins[: 4 + len(found)]
        row, own = pl.program_id(0), list(ins[4 + len(found) :])

        def numbers(ref: Any) -> Array:
            return ref[pl.ds(row, 1)]

        def load(columns: Array) -> Array:
            return logits_ref[jnp.full_like(columns, row), columns]

        # A kernel's lengths are powers of 2: what lies behind is a tile without ids.
        columns = lax.broadcasted_iota(jnp.int32, (1, 1 << (num - 1).bit_length()), 1)
        nothing = tiles.Statistics(peak=tiles.LOWEST, whole=0.0, mass=0.0, moment=0.0)
        of_row = (
            triton.load(ref.at[jnp.full_like(columns, row), columns], mask=columns < num, other=blank)
            for ref, blank in zip(found_refs, nothing, strict=True)
        )
        lowest = None if thresholds is None else numbers(own.pop(0))
        drawn = tiles.sampled(
            tiles.InMemory(load, logits.shape),
            tiles.Statistics(*of_row),
            tuple(seeds_ref[pl.ds(row, 1), pl.ds(word, 1)] for word in range(2)),
            numbers(at_ref),
            numbers(heat_ref),
            lowest,
            None if given is None else numbers(own.pop(0)),
        )
        for ref, one in zip(outs, drawn, strict=True):
            ref[pl.ds(row, 1)] = one

    ints, floats = (jax.ShapeDtypeStruct((rows,), dtype) for dtype in (jnp.int32, jnp.float32))
    run = pl.pallas_call(
        kernel,
        grid=(rows,),
        out_shape=sampling.Drawn(ints, floats, floats, floats, ints),
        compiler_params=triton.CompilerParams(num_warps=4),
        interpret=interpret,
        name="sample",
    )
    return run(logits, *found, seeds, positions, temperatures, *more)
