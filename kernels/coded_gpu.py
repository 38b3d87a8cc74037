"""Paged attention over pages of codes on NVIDIA GPUs, in Pallas-Triton: the walk of attention_gpu.py.

A program takes one tile of (row, query head) pairs, one key head and one stretch of positions. It loads PLACE codes at a time,
widens them to the dtype of the queries in registers, and multiplies scores and weights by the scales.

Invariant: that of attention_gpu.py. Weights of positions that a row does not see are exactly zero, whatever their scales are.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from jaxrl_post.kernels import eight_bits
from jaxrl_post.kernels.pallas_triton import pl, triton

HEADS = (64, 128, 256)
PAGES = (64, 128, 256)
NEEDS = (
    "for a cache in 8 bits bfloat16 or float16, heads of 64, 128 or 256, at most 64 query heads for a key head, and pages of 64, "
    "128 or 256"
)
LOG2E = 1.4426950408889634
BIG_NEGATIVE = -1e30
WIDE_HEAD, WARPS, STAGES = 256, 4, 2  # a wide head has twice the warps: their registers hold its values


class Walk(NamedTuple):
    """What a walk is compiled for.

    tile, place: pairs of a tile, and positions that are loaded at once. padded: query heads of a key head, with idle ones.
    stretch: places of a program. stretches: programs that share the positions of a row."""

    tile: int
    place: int
    padded: int
    stretch: int
    stretches: int
    window: int | None
    soft_cap: float | None


def serves(dtype: Any, cached: Any, head_dim: int, page: int) -> bool:
    return cached in eight_bits.DTYPES and jnp.dtype(dtype).itemsize == 2 and head_dim in HEADS and page in PAGES


def walk(
    q: Float[Array, "K pairs H"],
    pages: Array,
    table: Int[Array, "S blocks"],
    tiles: Int[Array, "tiles 4"],
    scales: Float[Array, "pages C page"],
    how: Walk,
    interpret: bool = False,
) -> tuple[Float[Array, "I K pairs H"], Float[Array, "I K pairs"], Float[Array, "I K pairs"]]:
    """Returns the mixed values of each stretch, its peak and its mass.

    Args:
      q: a tile's pairs begin at its first row times `how.padded`.
      pages: codes [pages, page, 2K, H].
      interpret: runs without a device.
    """
    K, pairs, H = q.shape
    return pl.pallas_call(
        functools.partial(_kernel, how),
        grid=(len(tiles), K, how.stretches),
        out_shape=[jax.ShapeDtypeStruct((how.stretches, K, pairs, *more), jnp.float32) for more in ((H,), (), ())],
        compiler_params=triton.CompilerParams(num_warps=WARPS * (2 if H >= WIDE_HEAD else 1), num_stages=STAGES),
        interpret=interpret,
        name="attend_codes",
    )(q, pages, table, tiles, scales)


def _kernel(how: Walk, *refs: Any) -> None:
    tile, place, padded, stretch, _, window, soft_cap = how
    q, pages, table, tiles, scales, *made = refs
    number, head, part = (pl.program_id(axis) for axis in range(3))
    slot, row, count, position = (tiles[number, column] for column in range(4))
    first = part * stretch
    end = jnp.minimum(lax.div(position + count - 1, place) + 1, first + stretch)
    if window is not None:
        first = jnp.maximum(first, lax.div(jnp.maximum(position - window + 1, 0), place))
    pair = lax.broadcasted_iota(jnp.int32, (tile, place), 0)
    column = lax.broadcasted_iota(jnp.int32, (tile, place), 1)

    @pl.when((count > 0) & (end > first))
    def _():
        mine, per_page = pl.ds(row * padded, tile), pages.shape[1] // place
        queries = q[head, mine, :]

        def step(at: Any, carry: Any) -> Any:
            mixed, peak, mass = carry
            page = table[slot, jnp.minimum(lax.div(at, per_page), table.shape[1] - 1)]
            page, some = jnp.clip(page, 0, pages.shape[0] - 1), pl.ds(lax.rem(at, per_page) * place, place)
            keys, values = (pages[page, some, 2 * head + side, :].astype(queries.dtype) for side in range(2))
            # Codes of 8-bit floats that nobody wrote may stand for no number, and 0 times that is none.
            behind = at * place + lax.broadcasted_iota(jnp.int32, values.shape, 0) >= position + count
            values = jnp.where(behind, jnp.zeros_like(values), values)
            by_key, by_value = (scales[page, 2 * head + side, some][None, :] for side in range(2))
            scores = jnp.dot(queries, keys.T, preferred_element_type=jnp.float32) * by_key
            if soft_cap is not None:
                scores = soft_cap * jnp.tanh(scores / soft_cap)
            # Position c <= row r // padded is computed as c * padded <= r, without a division.
            reach = (column + (at * place - position)) * padded
            seen = reach <= pair if window is None else (reach <= pair) & (pair < reach + window * padded)
            scores = jnp.where(seen, scores, BIG_NEGATIVE)
            high = jnp.maximum(peak, jnp.max(scores, axis=1))
            shrink = jnp.exp2((peak - high) * LOG2E)
            weights = jnp.where(seen, jnp.exp2((scores - high[:, None]) * LOG2E), 0.0)
            scaled = jnp.where(seen, weights * by_value, 0.0).astype(queries.dtype)
            mixed = mixed * shrink[:, None] + jnp.dot(scaled, values, preferred_element_type=jnp.float32)
            return mixed, high, mass * shrink + jnp.sum(weights, axis=1)

        start = (
            jnp.zeros((tile, q.shape[2]), jnp.float32),
            jnp.full((tile,), BIG_NEGATIVE, jnp.float32),
            jnp.zeros((tile,), jnp.float32),
        )
        mixed, peak, mass = lax.fori_loop(first, end, step, start)
        own = jnp.arange(tile, dtype=jnp.int32) < count * padded
        for to, value in zip(made, (mixed, peak, mass), strict=True):
            mask = jnp.broadcast_to(own[:, None], value.shape) if value.ndim > 1 else own
            triton.store(to.at[(part, head, mine, *[pl.ds(0, q.shape[2])] * (value.ndim - 1))], value, mask=mask)
