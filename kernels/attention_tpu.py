"""Paged attention on TPU, in Pallas: rows of one slot share the pages that they read.

Consecutive rows of a slot are packed into tiles. The kernel walks all tiles, and each tile walks its slot's pages once,
BLOCK positions a turn. Pages are copied into a ring of buffers, several turns ahead, also across tiles. A turn takes
every key head in order, and keeps an online softmax for each of the tile's (row, query head) pairs.

Layout: a position has C rows of L numbers in the cache, and L is a multiple of 128. Heads of 128 and more have a row
for the key and one for the value. A key and a value of 64 numbers share a row. Two rows lie in the halves of one row of
32-bit words, so a strided load finds both. Four rows of codes do. Scales lie along lanes, as the scores of a turn do.

Invariant: the same as the reference's (attention.py). Turns start at fixed positions, products have fixed shapes, and
the mass divides once, at the end. A turn whose positions a row does not see multiplies its sums by exactly 1 and adds
exact zeros. So a row's bits do not depend on other rows of its tile, on its place in the tile, or on longer slots. The
one exception needs a model that is broken already: a row becomes NaN if a later row of its tile (a draft's) has an
infinite key or value. Refuses shapes for which `serves` is False.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Shaped

from jaxrl_post.kernels import eight_bits, row_tiles
from jaxrl_post.kernels.pallas_tpu import in_hbm, pl, pltpu
from jaxrl_post.kernels.sinks import joined

LANES, SUBLANES = 128, 8
BLOCK = 256  # positions of one turn
PAIRS = 64  # (row, query head) pairs of a tile: fewer would not make the matrix unit any faster
PROMPT_PAIRS = 512  # of a tile of a prompt
RING = 4  # buffers of BLOCK positions, where they are small
RING_BYTES = 4 << 20  # that they may fill; there are two in any case
STATE_BYTES = 2 << 20  # that the queries of a prompt's tile may fill
SPARE_BYTES = 12 << 20  # of the chip's memory, for what the compiler keeps beside our buffers
NEEDS = (
    "bfloat16, heads of 64 or of a multiple of 128, pages of 8, 16, 32, 64, 128 or 256, and 1, 2 or a multiple of 4 key "
    "heads (2, 4 or a multiple of 8 for heads of 64)"
)
NEEDS_OF_CODES = (
    "for a cache in 8 bits bfloat16, heads of 64 or of a multiple of 128, pages of 64, 128 or 256, and 2, 4 or a multiple of 8 key "
    "heads (4, 8 or a multiple of 16 for heads of 64)"
)
TABLE = 1 << 17  # entries of a page table that fit into scalar memory beside other data
BIG_NEGATIVE = -1e30


def serves(dtype: Any, cached: Any, heads: int, kv_heads: int, head_dim: int, page: int) -> bool:
    wide = head_dim if head_dim % LANES == 0 else 2 * head_dim
    lines = 2 * kv_heads * head_dim // wide  # rows of a position
    if cached in eight_bits.DTYPES:
        return dtype == jnp.bfloat16 and wide % LANES == 0 and _tiled(lines, 4) and page in (64, 128, 256)
    paged = wide % LANES == 0 and page % 8 == 0 and BLOCK % page == 0
    return dtype == cached == jnp.bfloat16 and paged and _tiled(lines, 2)


def _tiled(lines: int, packed: int) -> bool:
    """Returns whether rows of a position, of which so many share 32 bits, lie in memory without gaps."""
    return lines in (packed, 2 * packed) or lines % (4 * packed) == 0


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
    pairs: int = PAIRS,
    interpret: Any = False,
) -> Float[Array, "R N H"]:
    """Returns attention.attention over the cache's pages.

    `scales`: of codes. `pairs`: (row, query head) pairs of a tile, at most. `interpret`: True, to run without a device."""
    how = dict(scale=scale, window=window, soft_cap=soft_cap, scales=scales, pairs=pairs, interpret=interpret)
    return jnp.where(rows.real[:, None, None], unrounded(q, pages, rows, sinks, **how), 0).astype(q.dtype)


def unrounded(
    q: Float[Array, "R N H"],
    pages: Shaped[Array, "pages page C L"],
    rows: Any,
    sinks: Float[Array, " N"] | None = None,
    *,
    scale: float,
    window: int | None,
    soft_cap: float | None,
    scales: Float[Array, "pages C2 page"] | None = None,
    pairs: int,
    interpret: Any,
) -> Float[Array, "R N H"]:
    """Returns `attention` in float32, as the kernel computes it. Rows that are not real hold anything."""
    R, N, H = q.shape
    L = -(-H // LANES) * LANES
    pages = pages.reshape(*pages.shape[:2], -1, L)  # as `attention.empty` made them
    K, blocks = pages.shape[2] * L // (2 * H), rows.table.shape[1]
    padded = -(-N // K // SUBLANES) * SUBLANES
    size = max(1, min(pairs // padded, R))
    packed = (q * scale).astype(q.dtype).astype(jnp.float32).reshape(R, K, N // K, H)
    packed = jnp.pad(packed, ((0, 0), (0, 0), (0, padded - N // K), (0, L - H))).reshape(R, K * padded, L)
    own = ()
    if sinks is not None:
        near = jnp.pad(sinks.astype(jnp.float32).reshape(K, N // K), ((0, 0), (0, padded - N // K)))
        own = (jnp.broadcast_to(near[..., None], (K, padded, LANES)),)
    own = own if scales is None else (*own, in_hbm(scales))
    held = jnp.dtype(pages.dtype), scales is not None, sinks is not None
    shape = _Shape(size, padded, K, H, L, pages.shape[1], blocks, window, soft_cap, *held)
    tiles = row_tiles.of(rows, size)
    table = jnp.clip(rows.table, 0, pages.shape[0] - 1).astype(jnp.int32)
    out, step = None, max(1, TABLE // blocks)
    for begin in range(0, tiles.shape[0], step):
        some = tiles[begin : begin + step]
        made = _kernel(shape, interpret)(some.reshape(-1), table[some[:, 0]].reshape(-1), packed, pages, *own)
        first = jnp.where(some[0, 2] > 0, some[0, 1], R)  # rows before it belong to tiles of an earlier call
        out = made if out is None else jnp.where((jnp.arange(R) < first)[:, None, None], out, made)
    return out.reshape(R, K, padded, L)[:, :, : N // K, L - H :].reshape(R, N, H)


def prompt_attention(
    q: Float[Array, "R N H"],
    pages: Shaped[Array, "pages page C L"],
    rows: Any,
    sinks: Float[Array, " N"] | None = None,
    *,
    scale: float,
    window: int | None,
    soft_cap: float | None,
    scales: Float[Array, "pages C2 page"] | None = None,
    interpret: Any = False,
) -> Float[Array, "R N H"]:
    """Returns prompt_attention.attention over the cache's pages, with the largest tiles that fit.

    `scales`, `interpret`: as in `attention`."""
    R, N, H = q.shape
    K = math.prod(pages.shape[2:]) // (2 * H)
    padded, tile = -(-N // K // SUBLANES) * SUBLANES, R // rows.table.shape[0]
    fits = STATE_BYTES // (4 * K * max(H, LANES))
    pairs = max(PAIRS, min(PROMPT_PAIRS, fits, tile * padded))
    how = dict(scale=scale, window=window, soft_cap=soft_cap, scales=scales)
    return attention(q, pages, rows, sinks, pairs=pairs, interpret=interpret, **how)


class _Shape(NamedTuple):
    """What the kernel is compiled for. size: rows of a tile. padded: query heads of a key head, with idle ones.

    blocks: entries of a tile's page table. dtype: of the pages. coded: they hold codes. sunk: there are sinks."""

    size: int
    padded: int
    K: int
    H: int
    L: int
    page: int
    blocks: int
    window: int | None
    soft_cap: float | None
    dtype: Any
    coded: bool
    sunk: bool

    @property
    def lines(self) -> int:
        """Rows of a position in the cache."""
        return 2 * self.K * self.H // self.L

    @property
    def ring(self) -> int:
        return max(2, min(RING, RING_BYTES // (self.dtype.itemsize * BLOCK * self.lines * self.L)))

    @property
    def packed(self) -> int:
        """Rows of a position that share 32 bits."""
        return 4 // self.dtype.itemsize


class _Refs(NamedTuple):
    """Arguments, results, buffers and semaphores of the kernel, in the order of `_kernel`. `sinks`, `scales`: None without any."""

    tiles: Any
    table: Any
    q: Any
    pages: Any
    sinks: Any
    scales: Any
    out: Any
    near_pages: Any
    near_scales: Any
    near_q: Any
    near_out: Any
    mixed: Any
    peak: Any
    mass: Any
    pages_ready: Any
    q_ready: Any
    out_done: Any


def _kernel(shape: _Shape, interpret: Any) -> Any:
    """Returns the kernel for this shape: (tiles, their page tables, q [R, K*padded, L], pages, *sinks) -> out, as q.

    Tiles and page tables are flat, in scalar memory. Rows of no tile are not written. Sinks are one array
    [K, padded, 128] with the sink of each query head along a row, or nothing. Behind them are the scales of codes, if any."""
    s = shape
    pairs, heads = s.size * s.padded, s.K * s.padded
    scratch = (
        pltpu.VMEM((s.ring, s.L // LANES, BLOCK, s.lines, LANES), s.dtype),  # a strided load takes 128 columns
        *([pltpu.VMEM((s.ring, BLOCK // s.page, 2 * s.K, s.page), jnp.float32)] if s.coded else []),
        pltpu.VMEM((2, s.size, heads, s.L), jnp.float32),
        pltpu.VMEM((s.size, heads, s.L), jnp.float32),
        pltpu.VMEM((s.K, pairs, s.L), jnp.float32),
        pltpu.VMEM((s.K, pairs, LANES), jnp.float32),
        pltpu.VMEM((s.K, pairs, LANES), jnp.float32),
    )
    ready = (pltpu.SemaphoreType.DMA((s.ring,)), pltpu.SemaphoreType.DMA((2,)), pltpu.SemaphoreType.DMA((1,)))
    far = pl.BlockSpec(memory_space=pl.ANY)
    held = sum(one.dtype.itemsize * math.prod(one.shape) for one in scratch)

    def run(tiles, table, q, pages, *more):
        near = [pl.BlockSpec(memory_space=pltpu.VMEM)] * s.sunk + [far] * s.coded
        grid = pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=2,
            grid=(1,),
            in_specs=[far, far, *near],
            out_specs=far,
            scratch_shapes=[*scratch, *ready],
        )
        return pl.pallas_call(
            lambda *refs: _walk_tiles(shape, _named(shape, refs)),
            out_shape=jax.ShapeDtypeStruct(q.shape, q.dtype),
            grid_spec=grid,
            interpret=interpret,
            name=f"paged_rows_by_{s.size}",
            compiler_params=pltpu.CompilerParams(vmem_limit_bytes=held + SPARE_BYTES),
        )(tiles, table, q, in_hbm(pages), *more)

    return run


def _named(s: _Shape, refs: tuple) -> _Refs:
    """Returns the references by name, with None for those that the kernel does not have."""
    there = dict.fromkeys(_Refs._fields, True) | {"sinks": s.sunk, "scales": s.coded, "near_scales": s.coded}
    given = iter(refs)
    return _Refs(*(next(given) if there[name] else None for name in _Refs._fields))


def _walk_tiles(s: _Shape, refs: _Refs) -> None:
    """Computes all tiles in order. Pages and queries of what comes next are copied meanwhile."""
    tiles = refs.tiles.shape[0] // 4
    used = lax.while_loop(
        lambda tile: (tile < tiles) & (_tile(refs, jnp.minimum(tile, tiles - 1)).count > 0), lambda tile: tile + 1, 0
    )

    def one(tile, carry):
        pl.when(tile + 1 < used)(lambda: _move_rows(s, refs, tile + 1, "queries", "start"))
        _move_rows(s, refs, tile, "queries", "wait")
        refs.peak[...] = jnp.full(refs.peak.shape, BIG_NEGATIVE, jnp.float32)
        refs.mass[...] = jnp.zeros(refs.mass.shape, jnp.float32)
        refs.mixed[...] = jnp.zeros(refs.mixed.shape, jnp.float32)
        begin, end = _turns(s, _tile(refs, tile))
        carry = lax.fori_loop(begin, end, lambda turn, carry: _turn(s, refs, used, tile, turn, carry), carry)
        pl.when(tile > 0)(lambda: _move_rows(s, refs, tile - 1, "results", "wait"))
        _finish(s, refs)
        _move_rows(s, refs, tile, "results", "start")
        return carry

    @pl.when(used > 0)
    def _():
        _move_rows(s, refs, 0, "queries", "start")
        next_one = (jnp.int32(0), _turns(s, _tile(refs, 0))[0])
        next_one = lax.fori_loop(0, s.ring - 1, lambda place, at: _fetch(s, refs, used, *at, place), next_one)
        lax.fori_loop(0, used, one, (jnp.int32(0), *next_one))
        _move_rows(s, refs, used - 1, "results", "wait")


class _Tile(NamedTuple):
    """The rows of a tile: the first one, how many, and the position of the first."""

    row: Any
    count: Any
    position: Any


def _tile(refs: _Refs, tile) -> _Tile:
    return _Tile(*(refs.tiles[4 * tile + column] for column in (1, 2, 3)))


def _reach(s: _Shape, tile: _Tile):
    """Returns the first position that a row of the tile sees, and the one behind the last."""
    low = 0 if s.window is None else jnp.maximum(tile.position - s.window + 1, 0)
    return low, tile.position + tile.count


def _turns(s: _Shape, tile: _Tile):
    """Returns the first turn of the tile, and the one behind its last."""
    low, end = _reach(s, tile)
    return lax.div(jnp.int32(low), BLOCK), lax.div(end + BLOCK - 1, BLOCK)


def _move_rows(s: _Shape, refs: _Refs, tile, what: str, how: str) -> None:
    """Starts copies of a tile's queries or results, or waits for them.

    A copy has a fixed size, so the rows are copied by the powers of two in their count."""
    row, count, _ = _tile(refs, tile)
    for bit in range(s.size.bit_length()):

        def copy(bit=bit):
            done, size = count & ((1 << bit) - 1), 1 << bit
            far, near = pl.ds(row + done, size), pl.ds(done, size)
            if what == "queries":
                place = lax.rem(tile, 2)
                moved = pltpu.make_async_copy(refs.q.at[far], refs.near_q.at[place, near], refs.q_ready.at[place])
            else:
                moved = pltpu.make_async_copy(refs.near_out.at[near], refs.out.at[far], refs.out_done.at[0])
            getattr(moved, how)()

        pl.when((count >> bit) & 1 == 1)(copy)


def _move_pages(s: _Shape, refs: _Refs, tile, turn, place, how: str) -> None:
    """Starts copies of the pages of one turn into a buffer, or waits for them. Reads pages that the tile sees, only."""
    low, end = _reach(s, _tile(refs, tile))
    size = BLOCK // s.page
    first = jnp.maximum(turn * size, lax.div(jnp.int32(low), s.page))
    last = jnp.minimum((turn + 1) * size, lax.div(end + s.page - 1, s.page))

    def one(number, _):
        near = pl.ds(pl.multiple_of((number - turn * size) * s.page, s.page), s.page)
        page = refs.pages.at[refs.table[tile * s.blocks + number]]
        for part in range(s.L // LANES):
            columns, target = pl.ds(part * LANES, LANES), refs.near_pages.at[place, part, near]
            getattr(pltpu.make_async_copy(page.at[:, :, columns], target, refs.pages_ready.at[place]), how)()
        if s.coded:
            source = refs.scales.at[refs.table[tile * s.blocks + number]]
            target = refs.near_scales.at[place, number - turn * size]
            getattr(pltpu.make_async_copy(source, target, refs.pages_ready.at[place]), how)()

    lax.fori_loop(first, last, one, None)


def _fetch(s: _Shape, refs: _Refs, used, tile, turn, place):
    """Starts the copies of one turn, if there is one. Returns tile and turn of the next one."""
    known = jnp.minimum(tile, used - 1)
    pl.when(tile < used)(lambda: _move_pages(s, refs, known, turn, place, "start"))
    more = turn + 1 < _turns(s, _tile(refs, known))[1]
    following = _turns(s, _tile(refs, jnp.minimum(tile + 1, used - 1)))[0]
    return jnp.where(more, tile, tile + 1), jnp.where(more, turn + 1, following)


def _turn(s: _Shape, refs: _Refs, used, tile, turn, carry):
    """Takes BLOCK positions into the sums of the tile. `carry`: turns so far, and what is fetched next."""
    done, *ahead = carry
    ahead = _fetch(s, refs, used, *ahead, lax.rem(done + s.ring - 1, s.ring))
    place, given = lax.rem(done, s.ring), _tile(refs, tile)
    _move_pages(s, refs, tile, turn, place, "wait")
    seen, fresh = _seen(s, turn * BLOCK - given.position), _fresh(s, turn, *_reach(s, given))
    scales = _scales(s, refs, turn, place, *_reach(s, given)) if s.coded else None
    for group in range(s.lines // s.packed):
        words = jnp.where(fresh, _words(refs.near_pages, place, group), jnp.uint32(0))
        lines = [_unpacked(s, words, part) for part in range(s.packed)]
        ways = zip(lines[::2], lines[1::2]) if s.L == s.H else zip(lines, lines)
        for number, (keys, values) in enumerate(ways, group * (s.packed * s.L // (2 * s.H))):
            _attend(s, refs, tile, number, keys, values, seen, scales)
    return done + 1, *ahead


def _fresh(s: _Shape, turn, low, end):
    """Returns bool[BLOCK, L]: the positions that the tile sees. Others may hold infinite values, and 0 * inf is not
    0."""
    at = turn * BLOCK + lax.broadcasted_iota(jnp.int32, (BLOCK, s.L), 0)
    return (at >= low) & (at < end)


def _scales(s: _Shape, refs: _Refs, turn, place, low, end):
    """Returns the scales of a turn's keys and values, [2K, BLOCK], and 0 where the tile sees nothing."""
    found = jnp.concatenate([refs.near_scales[place, page] for page in range(BLOCK // s.page)], axis=1)
    at = turn * BLOCK + lax.broadcasted_iota(jnp.int32, found.shape, 1)
    return jnp.where((at >= low) & (at < end), found, 0.0)


def _words(near, place, group):
    """Returns neighbouring rows of each position, as uint32 [BLOCK, L]: the first in the lowest bits."""
    (_, parts, positions, lines, _), packed = near.shape, 4 // jnp.dtype(near.dtype).itemsize
    found = []
    for part in range(parts):
        words = near.at[place, part].bitcast(jnp.uint32).reshape(positions * lines // packed, LANES)
        found.append(words[pl.ds(group, positions, stride=lines // packed), :])
    return jnp.concatenate(found, axis=1)


def _unpacked(s: _Shape, words, part: int):
    """Returns the row `part` of those that share words, in bfloat16."""
    if not s.coded:
        return _half(words & jnp.uint32(0xFFFF0000) if part else words << 16)
    words = lax.bitcast_convert_type(words, jnp.int32) << (24 - 8 * part)
    if s.dtype == jnp.int8:
        return (words >> 24).astype(jnp.float32).astype(jnp.bfloat16)
    # e4m3: a sign, four bits of the exponent, of bias 7, and three of the fraction. Without an exponent, steps of 2 ** -9.
    size, sign = lax.shift_right_logical(words << 1, 25), words & jnp.int32(-(1 << 31))
    normal = lax.bitcast_convert_type((size << 20) + jnp.int32((127 - 7) << 23), jnp.float32)
    found = jnp.where(size < 8, size.astype(jnp.float32) * 2.0**-9, normal)
    return jnp.where(sign == 0, found, -found).astype(jnp.bfloat16)


def _half(words):
    """Returns the bfloat16 whose bits are the upper halves of the words. The lower halves are zero."""
    return lax.bitcast_convert_type(words, jnp.float32).astype(jnp.bfloat16)


def _seen(s: _Shape, base):
    """Returns bool[pairs, BLOCK]: the positions that each (row, head) pair sees. `base`: the turn's first position,
    relative to the tile's first row.

    Position c <= row r // padded is computed as c * padded <= r, without a division."""
    shape = s.size * s.padded, BLOCK
    pair = lax.broadcasted_iota(jnp.int32, shape, 0)
    reach = (lax.broadcasted_iota(jnp.int32, shape, 1) + base) * s.padded
    return reach <= pair if s.window is None else (reach <= pair) & (pair < reach + s.window * s.padded)


def _attend(s: _Shape, refs: _Refs, tile, head, keys, values, seen, scales) -> None:
    """Takes one step of the online softmax for the pairs of one key head. scales: of codes, or None."""
    some = pl.ds(head * s.padded, s.padded)
    queries = refs.near_q[lax.rem(tile, 2), :, some, :].reshape(s.size * s.padded, s.L).astype(jnp.bfloat16)
    scores = _product(queries, keys, 1)
    if scales is not None:
        scores = scores * scales[2 * head : 2 * head + 1]
    if s.soft_cap is not None:
        scores = s.soft_cap * jnp.tanh(scores / s.soft_cap)
    peak = refs.peak[head]
    high, shrink, weights = _softened(peak, scores, seen)
    refs.peak[head] = high
    refs.mass[head] = refs.mass[head] * shrink + jnp.sum(weights, axis=1, keepdims=True)
    weights = weights if scales is None else weights * scales[2 * head + 1 : 2 * head + 2]
    mixed = _product(weights.astype(jnp.bfloat16), values, 0)
    refs.mixed[head] = refs.mixed[head] * _across(shrink, s.L) + mixed


def _softened(peak, scores, seen):
    """Returns the new peak, what the sums shrink by, and the weights. A row that sees nothing shrinks by exactly 1."""
    scores = jnp.where(seen, scores, BIG_NEGATIVE)
    high = jnp.maximum(peak, jnp.max(scores, axis=1, keepdims=True))
    shrink = jnp.where(high > peak, jnp.exp(peak - high), 1.0)
    return high, shrink, jnp.where(seen, jnp.exp(scores - _across(high, BLOCK)), 0.0)


def _product(a, b, axis):
    """Returns the product over the columns of `a` and the given axis of `b`, float32."""
    return lax.dot_general(a, b, (((1,), (axis,)), ((), ())), preferred_element_type=jnp.float32)


def _across(column, width):
    """Returns a number for each row, [pairs, 128], as [pairs, width]."""
    return jnp.concatenate([column] * (width // LANES), axis=1)


def _finish(s: _Shape, refs: _Refs) -> None:
    """Lets the sinks join, and divides the sums by the mass."""
    for head in range(s.K):
        mass, mixed = refs.mass[head], refs.mixed[head]
        if refs.sinks is not None:
            shape = s.size, s.padded, LANES
            sink = jnp.broadcast_to(refs.sinks[head], shape).reshape(mass.shape)  # pairs are rows, then heads
            shrink, mass = joined(refs.peak[head], mass, sink)
            mixed = mixed * _across(shrink, s.L)
        out = mixed / _across(jnp.where(mass > 0, mass, 1.0), s.L)
        refs.near_out[:, pl.ds(head * s.padded, s.padded), :] = out.reshape(s.size, s.padded, s.L)
