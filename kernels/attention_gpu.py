"""Paged attention on Hopper GPUs, in Mosaic GPU: rows of one slot share the pages that they read.

Consecutive rows of a slot, with the query heads of one KV head, are packed into tiles of 64 (row, head) pairs. A block
of the grid takes one tile, one KV head and one stretch of positions. It loads pages one by one into a ring in shared
memory, multiplies on the tensor cores, and keeps an online softmax in registers. Stretches are combined afterwards.

Invariant: the same as the reference's (attention.py). Stretches start at fixed positions, pages are walked in order,
and masked entries weigh exactly zero. So a row's bits do not depend on other rows of its tile, on its place in the
tile, or on longer slots. The one exception needs a model that is broken already: a row becomes NaN if a later row of
its tile (a draft's) has an infinite value. Refuses shapes for which `serves` is False.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

from jaxrl_post.kernels import row_tiles
from jaxrl_post.kernels.pallas_gpu import pl, plgpu

TILE = 64  # rows of one wgmma
PAGE = 64  # positions of a page: 16 KB of keys of 128 numbers, one copy by the TMA
ALIGN = 8  # the TMA needs the first row of a tile at a multiple of this
STAGES = 3  # pages in shared memory
STATS = 32  # columns that hold a row's peak and mass: 128 bytes, so that rows stay aligned
STRETCH = 1024  # fewest positions of one block of the grid
STRETCHES = 8  # most blocks that share a row's positions
NEEDS = "bfloat16 or float16, heads of 64 or 128, at most 64 query heads for a key head, and pages of 64"
LOG2E = 1.4426950408889634
BIG_NEGATIVE = -1e30


def serves(dtype: Any, cached: Any, heads: int, kv_heads: int, head_dim: int, page: int) -> bool:
    """Returns whether the kernel takes these shapes."""
    return (
        dtype == cached
        and jnp.dtype(dtype).itemsize == 2
        and head_dim in (64, 128)
        and page == PAGE
        and heads // kv_heads <= TILE
    )


def attention(
    q: Float[Array, "R N H"],
    pages: Float[Array, "pages page KV H"],
    rows: Any,
    *,
    scale: float,
    window: int | None,
    soft_cap: float | None,
    interpret: Any = None,
) -> Float[Array, "R N H"]:
    """Returns attention.attention over the cache's pages.

    `interpret`: plgpu.InterpretGPUParams, to run without a device."""
    R, N, H = q.shape
    pages = pages.reshape(*pages.shape[:2], -1, H)  # a key and a value of 64 numbers share a row
    K = pages.shape[2] // 2
    group, blocks = N // K, rows.table.shape[1]
    padded = -(-group // ALIGN) * ALIGN
    stretch = max(STRETCH // PAGE, -(-blocks // STRETCHES))
    packed = (q * scale).reshape(R, K, group, H).transpose(1, 0, 2, 3)
    packed = jnp.pad(packed, ((0, 0), (0, 0), (0, padded - group), (0, 0))).reshape(K, R * padded, H)
    packed = jnp.pad(packed, ((0, 0), (0, TILE), (0, 0)))  # the last tile reads beyond the rows
    run = _kernel(
        R,
        K,
        H,
        q.dtype,
        tiles=row_tiles.most(rows, TILE // padded),
        padded=padded,
        stretch=stretch,
        stretches=-(-blocks // stretch),
        window=window,
        soft_cap=soft_cap,
        interpret=interpret,
    )
    out, stats = run(packed, pages, rows.table, row_tiles.of(rows, TILE // padded))
    shape = (-1, K, R, padded)
    out, peak, mass = out.reshape(*shape, H), stats[..., 0].reshape(shape), stats[..., -1].reshape(shape)
    return _combined(out, peak, mass, rows, stretch * PAGE, window)[:, :, :group].reshape(R, N, H).astype(q.dtype)


def _combined(
    out: Float[Array, "I K R G H"],
    peak: Float[Array, "I K R G"],
    mass: Float[Array, "I K R G"],
    rows: Any,
    stretch: int,
    window: int | None,
) -> Float[Array, "R K G H"]:
    """Returns the softmax-weighted sum over I stretches. Stretches that a row does not reach were never written, and
    are skipped."""
    begin = jnp.arange(out.shape[0])[:, None] * stretch
    low = jnp.zeros_like(rows.position) if window is None else rows.position - window + 1
    reached = rows.real & (begin <= rows.position) & (begin + stretch > low)
    reached = reached[:, None, :, None]
    peak = jnp.where(reached, peak, BIG_NEGATIVE)
    share = jnp.where(reached, jnp.exp(peak - jnp.max(peak, axis=0)), 0.0)
    mass = jnp.sum(jnp.where(reached, share * mass, 0.0), axis=0)
    out = jnp.sum(jnp.where(reached[..., None], share[..., None] * out, 0.0), axis=0)
    return jnp.moveaxis(out / jnp.where(mass > 0, mass, 1.0)[..., None], 0, 1)


def _kernel(
    R: int,
    K: int,
    H: int,
    dtype: Any,
    *,
    tiles: int,
    padded: int,
    stretch: int,
    stretches: int,
    window: int | None,
    soft_cap: float | None,
    interpret: Any,
) -> Any:
    """Returns the kernel for these shapes: (q [K, R*padded + 64, H], pages, table, tiles [tiles, 4]) -> (values,
    stats).

    values: the mixed values of each stretch, [stretches, K, R*padded, H]. stats: peak and mass, in the first and last
    of 32 columns."""
    half = (plgpu.TilingTransform((8, 64)), plgpu.SwizzleTransform(128))
    return plgpu.kernel(
        functools.partial(_body, padded=padded, stretch=stretch, window=window, soft_cap=soft_cap),
        out_type=(
            jax.ShapeDtypeStruct((stretches, K, R * padded, H), jnp.float32),
            jax.ShapeDtypeStruct((stretches, K, R * padded, STATS), jnp.float32),
        ),
        scratch_types=(
            plgpu.SMEM((TILE, H), dtype, transforms=half),
            plgpu.SMEM((STAGES, PAGE, H), dtype, transforms=half),
            plgpu.SMEM((STAGES, PAGE, H), dtype, transforms=half),
            plgpu.SMEM((TILE, PAGE), dtype, transforms=half),
            plgpu.SMEM((TILE, H), jnp.float32),
            plgpu.SMEM((TILE, STATS), jnp.float32),
            plgpu.Barrier(),
            plgpu.Barrier(num_barriers=STAGES),
            plgpu.Barrier(num_barriers=STAGES),
        ),
        grid=(tiles, K, stretches),
        grid_names=("tile", "head", "stretch"),
        interpret=interpret,
        compiler_params=plgpu.CompilerParams(lowering_semantics=plgpu.LoweringSemantics.Warpgroup),
    )


def _body(*refs, padded, stretch, window, soft_cap):
    """Computes one tile, KV head and stretch.

    `refs`: inputs, outputs, shared memory and barriers, in the order of `_kernel`."""
    q_ref, pages_ref, table_ref, tiles_ref, out_ref, stats_ref, *scratch = refs
    q_smem, k_smem, v_smem, w_smem, out_smem, stats_smem, q_ready, k_ready, v_ready = scratch
    tile, head, part = lax.axis_index("tile"), lax.axis_index("head"), lax.axis_index("stretch")
    slot, row, count, position = (tiles_ref[tile, column] for column in range(4))
    first = part * stretch
    end = jnp.minimum(lax.div(position + count - 1, PAGE) + 1, first + stretch)
    if window is not None:
        first = jnp.maximum(first, lax.div(jnp.maximum(position - window + 1, 0), PAGE))
    steps = end - first
    at = pl.multiple_of(row * padded, ALIGN)

    def fetch(step, place):
        page = jnp.clip(table_ref[slot, first + step], 0, pages_ref.shape[0] - 1)
        plgpu.copy_gmem_to_smem(pages_ref.at[page, :, 2 * head], k_smem.at[place], k_ready.at[place])
        plgpu.copy_gmem_to_smem(pages_ref.at[page, :, 2 * head + 1], v_smem.at[place], v_ready.at[place])

    def walk(step, carry):
        place = lax.rem(step, STAGES)
        base = (first + step) * PAGE - position  # first position of the page, relative to the tile's first row
        plgpu.barrier_wait(k_ready.at[place])
        scores = _product(q_smem, k_smem.at[place].transpose((1, 0)), PAGE)
        carry, weights = _softened(carry, scores, _seen(base, padded, window), soft_cap)
        w_smem[...] = weights.astype(w_smem.dtype)
        plgpu.barrier_wait(v_ready.at[place])
        pl.when(count - base < PAGE)(functools.partial(_clear, v_smem.at[place], count - base))
        plgpu.commit_smem()
        out, peak, mass = carry
        out = out + _product(w_smem, v_smem.at[place], out.shape[1])
        plgpu.commit_smem()  # all warps have read this place before the TMA refills it
        pl.when(step + STAGES < steps)(functools.partial(fetch, step + STAGES, place))
        return out, peak, mass

    @pl.when((count > 0) & (steps > 0))
    def _():
        plgpu.copy_gmem_to_smem(q_ref.at[head, pl.ds(at, TILE)], q_smem, q_ready)
        for ahead in range(STAGES):
            pl.when(ahead < steps)(functools.partial(fetch, ahead, ahead))
        plgpu.barrier_wait(q_ready)
        out_smem[...], peak, mass = lax.fori_loop(0, steps, walk, _nothing(out_smem.shape[1]))
        side = lax.broadcasted_iota(jnp.int32, (TILE, STATS), 1)
        stats_smem[...] = jnp.where(side < STATS // 2, _across(peak, STATS), _across(mass, STATS))
        plgpu.commit_smem()
        _store(count, padded, at, ((out_smem, out_ref.at[part, head]), (stats_smem, stats_ref.at[part, head])))


def _product(a, b, columns):
    """Returns a @ b from the tensor cores, float32."""

    def multiply(out):
        plgpu.wgmma(out, a, b)
        return out[...]

    return pl.run_scoped(multiply, plgpu.ACC((TILE, columns), jnp.float32))


def _across(vector, columns):
    """Returns a vector [64] as columns [64, columns]."""
    return lax.broadcast_in_dim(vector, (TILE, columns), [0])


def _nothing(head_dim):
    """Returns mixed values, peak and mass before the first page."""
    return (
        jnp.full((TILE, head_dim), 0, jnp.float32),
        jnp.full((TILE,), BIG_NEGATIVE, jnp.float32),
        jnp.full((TILE,), 0, jnp.float32),
    )


def _seen(base, padded, window):
    """Returns bool[64, 64]: the positions of the page that each (row, head) pair sees.

    Position c <= row r // padded is computed as c * padded <= r, without a division."""
    pair = lax.broadcasted_iota(jnp.int32, (TILE, PAGE), 0)
    reach = (lax.broadcasted_iota(jnp.int32, (TILE, PAGE), 1) + base) * padded
    return reach <= pair if window is None else (reach <= pair) & (pair < reach + window * padded)


def _softened(carry, scores, seen, soft_cap):
    """Takes one step of the online softmax. Returns the carry, scaled to the new peak, and the weights of this page."""
    out, peak, mass = carry
    if soft_cap is not None:
        scores = soft_cap * jnp.tanh(scores / soft_cap)
    scores = jnp.where(seen, scores, BIG_NEGATIVE)
    high = jnp.maximum(peak, scores.max(axis=1))
    shrink = jnp.exp2((peak - high) * LOG2E)
    weights = jnp.where(seen, jnp.exp2((scores - _across(high, PAGE)) * LOG2E), 0.0)
    return (out * _across(shrink, out.shape[1]), high, mass * shrink + weights.sum(axis=1)), weights


def _clear(values, left):
    """Zeroes the values behind the tile's last row: a stale value may be infinite, and 0 * inf is not 0."""
    there = lax.broadcasted_iota(jnp.int32, values.shape, 0)
    kept = values[...]
    values[...] = jnp.where(there < left, kept, jnp.zeros_like(kept))


def _store(count, padded, at, pairs):
    """Writes the tile's rows and no others.

    A copy has a fixed size, so the rows are copied by the powers of two in `count`."""
    for bit in range((TILE // padded).bit_length()):

        def copy(bit=bit):
            done, size = (count & ((1 << bit) - 1)) * padded, padded << bit
            for smem, gmem in pairs:
                plgpu.copy_smem_to_gmem(smem.at[pl.ds(done, size)], gmem.at[pl.ds(at + done, size)])

        pl.when((count >> bit) & 1 == 1)(copy)
    plgpu.wait_smem_to_gmem(0)
