"""Paged attention on Hopper GPUs, in Mosaic GPU: rows of one slot share the pages that they read.

Consecutive rows of a slot, with the query heads of one KV head, are packed into tiles of 64 (row, head) pairs. A block
of the grid takes one tile, one KV head and one stretch of positions. It loads 64 positions at a time into a ring in
shared memory, multiplies on the tensor cores, and keeps an online softmax in registers. The 64 positions are one page,
several smaller pages, or half of a page of 128. Stretches are combined afterwards.

The registers of a block hold 256 columns of mixed values. For heads of 512 two blocks have the same positions and half of
the values each. Both make all scores, so the keys are loaded twice: the two run side by side, and share the cache of the
device. Their ring has one place. New keys are loaded into it while the values are multiplied. Addresses in that place, and
in the queries, are computed in each step: registers that kept all of them for the walk would be missing elsewhere.

Invariant: the same as the reference's (attention.py). Stretches start at fixed positions, positions are walked in
order, and masked entries weigh exactly zero. So a row's bits do not depend on other rows of its tile, on its place in
the tile, or on longer slots. They do not depend on the page size where tables cover equally many positions. The one
exception needs a model that is broken already: a row becomes NaN if a later row of its tile (a draft's) has an infinite
value. Refuses shapes for which `serves` is False.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Shaped

from jaxrl_post.kernels import coded_gpu, eight_bits, row_tiles, rows_gpu, small_arrays
from jaxrl_post.kernels.pallas_gpu import pl, plgpu

TILE = 64  # rows of one wgmma
PLACE = 64  # positions of one place of the ring: 16 KB of keys of 128 numbers
PAGES = (16, 32, 64, 128)  # page sizes: parts or multiples of a place
STAGES = {64: 3, 128: 3, 256: 2, 512: 1}  # places of the ring, by head size: a block has 227 KB of shared memory
VALUES = 256  # most columns of mixed values of a block: 128 registers of each thread
COLUMNS = 128  # most of them that are multiplied and written at once
ALIGN = 8  # the TMA needs the first row of a tile at a multiple of this
STATS = 32  # columns that hold a row's peak and mass: 128 bytes, so that rows stay aligned
STRETCH = 1024  # fewest positions of one block of the grid
CODED_STRETCH = 2048  # the same of codes: each stretch writes sums in float32, which codes are small beside
STRETCHES = 8  # most blocks that share a row's positions
NEEDS = (
    "bfloat16 or float16, heads of 64, 128, 256 or 512, at most 64 query heads for a key head, and pages of 16 to 128"
)
NEEDS_OF_CODES = coded_gpu.NEEDS
MANY = 1 << 20  # more than the steps of any block: with one place, step // MANY is 0 in a way that no compiler sees
LOG2E = 1.4426950408889634
BIG_NEGATIVE = -1e30


def serves(dtype: Any, cached: Any, heads: int, kv_heads: int, head_dim: int, page: int) -> bool:
    if cached in eight_bits.DTYPES:
        return coded_gpu.serves(dtype, cached, head_dim, page) and heads // kv_heads <= TILE
    return (
        dtype == cached
        and jnp.dtype(dtype).itemsize == 2
        and head_dim in STAGES
        and page in PAGES
        and heads // kv_heads <= TILE
    )


def attention(
    q: Float[Array, "R N H"],
    pages: Shaped[Array, "pages page C L"],
    rows: Any,
    sinks: Float[Array, " N"] | None = None,
    *,
    scale: float,
    window: int | None,
    soft_cap: float | None,
    scales: Float[Array, "pages C2 page"] | None = None,
    interpret: Any = None,
) -> Float[Array, "R N H"]:
    """Returns attention.attention over the cache's pages.

    `scales`: of codes (coded_gpu.py). `interpret`: plgpu.InterpretGPUParams, to run without a device."""
    R, N, H = q.shape
    K = pages.shape[2] * pages.shape[3] // (2 * H)
    group, width = N // K, padded(N // K)
    queries = (q * scale).reshape(R, K, group, H).transpose(1, 0, 2, 3)
    queries = jnp.pad(queries, ((0, 0), (0, 0), (0, width - group), (0, 0))).reshape(K, R * width, H)
    queries = jnp.pad(queries, ((0, 0), (0, TILE), (0, 0)))  # the last tile reads beyond the rows
    how = dict(window=window, soft_cap=soft_cap, scales=scales, interpret=interpret)
    return attention_of_packed(queries, pages, rows, sinks, heads=N, **how)


def padded(group: int) -> int:
    """Returns the rows that the queries of one row and key head take."""
    return -(-group // ALIGN) * ALIGN


def attention_of_packed(
    queries: Float[Array, "K Q H"],
    pages: Shaped[Array, "pages page C L"],
    rows: Any,
    sinks: Float[Array, " N"] | None = None,
    *,
    heads: int,
    window: int | None,
    soft_cap: float | None,
    scales: Float[Array, "pages C2 page"] | None = None,
    interpret: Any = None,
) -> Float[Array, "R N H"]:
    """Returns what `attention` does, of scaled queries that are packed.

    Those of a row and key head lie behind one another, in `padded` rows. TILE rows stand behind the last."""
    (K, _, H), R = queries.shape, rows.slot.shape[0]
    pages = pages.reshape(*pages.shape[:2], -1, H)  # a key and a value of 64 numbers share a row
    places, width = -(-rows.table.shape[1] * pages.shape[1] // PLACE), padded(heads // K)
    stretch = max((STRETCH if scales is None else CODED_STRETCH) // PLACE, -(-places // STRETCHES))
    size, how = TILE // width, dict(padded=width, window=window, soft_cap=soft_cap)
    joined = functools.partial(row_tiles.joined, size, row_tiles.most(rows, size))
    given = rows.slot, rows.position, rows.real
    tiles = small_arrays.run_as_kernel(joined, given, interpret=interpret is not None)
    how |= dict(stretch=stretch, stretches=-(-places // stretch))
    if scales is None:
        pieces = max(1, PLACE // pages.shape[1])
        run = _kernel(R, K, H, queries.dtype, pieces=pieces, tiles=len(tiles), interpret=interpret, **how)
        out, stats = run(queries, pages, rows.table, tiles)
        peak = mass = stats
    else:
        walk = coded_gpu.Walk(tile=TILE, place=PLACE, **how)
        out, peak, mass = coded_gpu.walk(queries, pages, rows.table, tiles, scales, walk, interpret is not None)
        peak, mass = peak[..., None], mass[..., None]
    return rows_gpu.combined(
        out,
        peak,
        mass,
        rows.position,
        rows.real,
        sinks,
        heads=heads,
        padded=width,
        stretch=stretch * PLACE,
        window=window,
        dtype=queries.dtype,
        interpret=interpret is not None,
    )


def _kernel(
    R: int,
    K: int,
    H: int,
    dtype: Any,
    *,
    pieces: int,
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
    of 32 columns. `pieces`: copies that fill a place."""
    add = _added if interpret is None else _added_apart
    stages, half = STAGES[H], (plgpu.TilingTransform((8, 64)), plgpu.SwizzleTransform(128))
    return plgpu.kernel(
        functools.partial(_body, padded=padded, stretch=stretch, window=window, soft_cap=soft_cap, add=add),
        out_type=(
            jax.ShapeDtypeStruct((stretches, K, R * padded, H), jnp.float32),
            jax.ShapeDtypeStruct((stretches, K, R * padded, STATS), jnp.float32),
        ),
        scratch_types=(
            plgpu.SMEM((1, TILE, H), dtype, transforms=half),
            plgpu.SMEM((stages, PLACE, H), dtype, transforms=half),
            plgpu.SMEM((stages, PLACE, min(H, VALUES)), dtype, transforms=half),
            plgpu.SMEM((TILE, PLACE), dtype, transforms=half),
            plgpu.SMEM((TILE, min(H, COLUMNS)), jnp.float32),
            plgpu.SMEM((TILE, STATS), jnp.float32),
            plgpu.Barrier(),
            plgpu.Barrier(num_barriers=stages, num_arrivals=pieces),
            plgpu.Barrier(num_barriers=stages, num_arrivals=pieces),
        ),
        grid=(tiles, K, stretches, -(-H // VALUES)),
        grid_names=("tile", "head", "stretch", "side"),
        interpret=interpret,
        compiler_params=plgpu.CompilerParams(lowering_semantics=plgpu.LoweringSemantics.Warpgroup),
    )


def _body(*refs, padded, stretch, window, soft_cap, add):
    """Computes one tile, KV head and stretch, and one side of the values.

    `refs`: inputs, outputs, shared memory and barriers, in the order of `_kernel`. `add`: _added or _added_apart."""
    q_ref, pages_ref, table_ref, tiles_ref, out_ref, stats_ref, *scratch = refs
    q_smem, k_smem, v_smem, w_smem, out_smem, stats_smem, q_ready, k_ready, v_ready = scratch
    tile, head, part, side = (lax.axis_index(name) for name in ("tile", "head", "stretch", "side"))
    slot, row, count, position = (tiles_ref[tile, column] for column in range(4))
    (stages, _, width), first = v_smem.shape, part * stretch
    end = jnp.minimum(lax.div(position + count - 1, PLACE) + 1, first + stretch)
    if window is not None:
        first = jnp.maximum(first, lax.div(jnp.maximum(position - window + 1, 0), PLACE))
    steps = end - first
    at, left = pl.multiple_of(row * padded, ALIGN), pl.multiple_of(side * width, width)

    def fetch(step, place, some=slice(None)):
        keys = 2 * head, pl.ds(0, k_smem.shape[2]), k_smem.at[place], k_ready.at[place]
        values = 2 * head + 1, pl.ds(left, width), v_smem.at[place], v_ready.at[place]
        _fetch(pages_ref, table_ref, slot, (first + step) * PLACE, (keys, values)[some])

    early, late = (slice(1), slice(1, None)) if stages == 1 else (None, slice(None))

    def walk(step, carry):
        place = lax.rem(step, stages) if stages > 1 else lax.div(step, MANY)
        base = (first + step) * PLACE - position  # first position of the place, relative to the tile's first row
        plgpu.barrier_wait(k_ready.at[place])
        scores = _product(q_smem.at[0 if stages > 1 else place], k_smem.at[place].transpose((1, 0)), PLACE)
        (out, peak, mass), weights = _softened(carry, scores, _seen(base, padded, window), soft_cap)
        w_smem[...] = weights.astype(w_smem.dtype)
        plgpu.barrier_wait(v_ready.at[place])
        pl.when(count - base < PLACE)(functools.partial(_clear, v_smem.at[place], count - base))
        plgpu.commit_smem()
        if early:  # all warps have read the keys
            pl.when(step + stages < steps)(functools.partial(fetch, step + stages, place, early))
        out = add(out, w_smem, v_smem.at[place])
        plgpu.commit_smem()  # all warps have read this place before the TMA refills it
        pl.when(step + stages < steps)(functools.partial(fetch, step + stages, place, late))
        return out, peak, mass

    @pl.when((count > 0) & (steps > 0))
    def _():
        plgpu.copy_gmem_to_smem(q_ref.at[head, pl.ds(at, TILE)], q_smem.at[0], q_ready)
        for ahead in range(stages):
            pl.when(ahead < steps)(functools.partial(fetch, ahead, ahead))
        plgpu.barrier_wait(q_ready)
        out, peak, mass = lax.fori_loop(0, steps, walk, _nothing(width))

        @pl.when(side == 0)
        def _():
            column = lax.broadcasted_iota(jnp.int32, (TILE, STATS), 1)
            stats_smem[...] = jnp.where(column < STATS // 2, _across(peak, STATS), _across(mass, STATS))
            _store(count, padded, at, stats_smem, stats_ref.at[part, head])

        for index, columns in enumerate(out):
            out_smem[...] = columns
            _store(count, padded, at, out_smem, out_ref.at[part, head, :, _columns(out_smem, index, left)])


def _fetch(pages_ref, table_ref, slot, begin, places):
    """Starts the copies of positions begin .. begin + 63 of a slot into places of keys and of values.

    `places`: of each the line of a position, its columns, shared memory and barrier. Entries of the table behind the slot's
    end may be unmapped, or missing. Some page is read for them, and masked."""
    pages, page = pages_ref.shape[:2]
    size = min(page, PLACE)
    for done in range(0, PLACE, size):
        block = jnp.minimum(lax.div(begin + done, page), table_ref.shape[1] - 1)
        number = jnp.clip(table_ref[slot, block], 0, pages - 1)
        some = pl.ds(pl.multiple_of(lax.rem(begin + done, page), size), size)
        for line, columns, smem, ready in places:
            plgpu.copy_gmem_to_smem(pages_ref.at[number, some, line, columns], smem.at[pl.ds(done, size)], ready)


def _columns(ref, index, left=0):
    """Returns the slice of the columns, from `left` on, that `ref` holds in its turn `index`."""
    return pl.ds(left + index * ref.shape[1], ref.shape[1])


def _product(a, b, columns):
    """Returns a @ b from the tensor cores, float32."""

    def multiply(out):
        plgpu.wgmma(out, a, b)
        return out[...]

    return pl.run_scoped(multiply, plgpu.ACC((TILE, columns), jnp.float32))


def _across(vector, columns):
    """Returns a vector [64] as columns [64, columns]."""
    return lax.broadcast_in_dim(vector, (TILE, columns), [0])


def _nothing(values):
    """Returns mixed values (by at most COLUMNS of the `values` columns), peak and mass before the first place."""
    width = min(values, COLUMNS)
    return (
        tuple(jnp.full((TILE, width), 0, jnp.float32) for _ in range(values // width)),
        jnp.full((TILE,), BIG_NEGATIVE, jnp.float32),
        jnp.full((TILE,), 0, jnp.float32),
    )


def _added(out, weights, values):
    """Returns mixed values with those of a place added, in the registers that hold them: no others are left.

    The invariant needs weights of zero to keep every bit of the sum. Tensor cores up to the A100's do (Fasi et al. 2021,
    "Numerical behavior of NVIDIA tensor cores"). On an H100 rows over two pages have their bits also alone."""

    def multiply(sums):
        for index, columns in enumerate(sums):
            plgpu.wgmma(columns, weights, values.at[:, _columns(columns, index)])

    return pl.run_state(multiply)(tuple(map(plgpu.ACC.init, out)))


def _added_apart(out, weights, values):
    """Returns the same as `_added`, for the interpreter: its sums begin at zero."""
    width = out[0].shape[1]
    parts = (values.at[:, _columns(columns, index)] for index, columns in enumerate(out))
    return tuple(columns + _product(weights, part, width) for columns, part in zip(out, parts, strict=True))


def _seen(base, padded, window):
    """Returns bool[64, 64]: the positions of the place that each (row, head) pair sees.

    Position c <= row r // padded is computed as c * padded <= r, without a division."""
    pair = lax.broadcasted_iota(jnp.int32, (TILE, PLACE), 0)
    reach = (lax.broadcasted_iota(jnp.int32, (TILE, PLACE), 1) + base) * padded
    return reach <= pair if window is None else (reach <= pair) & (pair < reach + window * padded)


def _softened(carry, scores, seen, soft_cap):
    """Takes one step of the online softmax. Returns the carry, scaled to the new peak, and the weights of this place."""
    out, peak, mass = carry
    if soft_cap is not None:
        scores = soft_cap * jnp.tanh(scores / soft_cap)
    scores = jnp.where(seen, scores, BIG_NEGATIVE)
    high = jnp.maximum(peak, scores.max(axis=1))
    shrink = jnp.exp2((peak - high) * LOG2E)
    weights = jnp.where(seen, jnp.exp2((scores - _across(high, PLACE)) * LOG2E), 0.0)
    out = tuple(columns * _across(shrink, columns.shape[1]) for columns in out)
    return (out, high, mass * shrink + weights.sum(axis=1)), weights


def _clear(values, left):
    """Zeroes the values behind the tile's last row: a stale value may be infinite, and 0 * inf is not 0."""
    there = lax.broadcasted_iota(jnp.int32, values.shape, 0)
    kept = values[...]
    values[...] = jnp.where(there < left, kept, jnp.zeros_like(kept))


def _store(count, padded, at, smem, gmem):
    """Writes the tile's rows and no others, and waits until shared memory has been read.

    A copy has a fixed size, so the rows are copied by the powers of two in `count`."""
    plgpu.commit_smem()
    for bit in range((TILE // padded).bit_length()):

        def copy(bit=bit):
            done, size = (count & ((1 << bit) - 1)) * padded, padded << bit
            plgpu.copy_smem_to_gmem(smem.at[pl.ds(done, size)], gmem.at[pl.ds(at + done, size)])

        pl.when((count >> bit) & 1 == 1)(copy)
    plgpu.wait_smem_to_gmem(0)
