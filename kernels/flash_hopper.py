"""Attention of packed rows on Hopper GPUs, forward and backward, in Mosaic GPU.

Two groups of threads multiply on the tensor cores (wgmma), and a third one loads (warpgroups.py). Each of the two keeps 64 queries,
or in the walk over queries 64 keys. A walk meets the blocks that hold a pair that sees each other, and no others (flash.py).

- forward: the groups take turns, so that one computes weights while the other multiplies (arXiv 2407.08608 section 3.1).
- backward: one kernel walks keys and makes the gradient of the queries. Another walks the queries of all heads of a key head and
  makes the gradients of keys and values. Nothing is added by atomics, so equal inputs give equal bits.

What is multiplied next lies as the products leave it: weights go from registers into the tensor cores. A mask is computed only
for blocks at an edge of what the rows see. Refuses shapes for which `serves` is False.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from jaxrl_post.kernels import flash, warpgroups
from jaxrl_post.kernels.pallas_gpu import RECENT, pl, plgpu
from jaxrl_post.kernels.warpgroups import GROUPS, LOWEST, ROWS, Place, Ring, Seen, Tile, Walk

NEEDS = "jax 0.11 or later, bfloat16 or float16, heads of 64 or 128, and rows of a multiple of 128 tokens"


@dataclass(frozen=True)
class Tiles:
    """The tile of each kernel: forward, and backward by queries and by keys."""

    forward: Tile
    by_queries: Tile
    by_keys: Tile


# By head size, such that the ring fits into 227 KB of shared memory.
TILES = {
    64: Tiles(Tile(ROWS, 128, 4), Tile(ROWS, 64, 4), Tile(ROWS, 64, 4)),
    128: Tiles(Tile(ROWS, 128, 2), Tile(ROWS, 64, 4), Tile(ROWS, 64, 3)),
}


def serves(dtype: Any, heads: int, kv_heads: int, head_dim: int, tokens: int) -> bool:
    fits = head_dim in TILES and tokens % (GROUPS * ROWS) == 0
    return RECENT and jnp.dtype(dtype).itemsize == 2 and fits and heads % kv_heads == 0


@dataclass(frozen=True)
class _How(flash.How):
    """`interpret`: plgpu.InterpretGPUParams, or None."""

    tiles: Tiles

    def add(self, out: Array, a: Array, b: Any) -> Array:
        """Returns `out` with the product added: `a` from registers, `b` from shared memory."""
        if self.interpret is None:
            return pl.run_state(lambda sums: plgpu.wgmma(sums, a, b))(plgpu.ACC.init(out))
        # The interpreter's wgmma reads no registers. Threads that read what the TMA will write need a fence.
        exact = None if a.dtype.itemsize == 2 else lax.Precision.HIGHEST
        made = out + jnp.dot(a, b[...], preferred_element_type=out.dtype, precision=exact)
        plgpu.commit_smem()
        return made


def attention(
    q: Float[Array, "B T N H"],
    k: Float[Array, "B T K H"],
    v: Float[Array, "B T K H"],
    segment_ids: Int[Array, "B T"],
    sinks: Float[Array, " N"] | None = None,
    *,
    scale: float,
    window: int | None,
    soft_cap: float | None,
    saved: str = "attended",
    tiles: Tiles | None = None,
    interpret: Any = None,
) -> Float[Array, "B T N H"]:
    """Returns causal attention inside the segments of packed rows.

    Args:
      sinks: for each query head a score without a value, neither scaled nor capped.
      scale: above 0.
      window: a query sees its own position and the window - 1 before it.
      saved: name under which a remat policy may keep the output and the log of the mass.
      tiles: twice their own rows and each walked block must divide T. None: those of TILES.
      interpret: plgpu.InterpretGPUParams, to run without a device, in float32 too.

    Raises:
      ValueError: the scale is 0 or below, for which a key that is not seen would count.
    """
    how = _How(scale, window, soft_cap, saved, interpret, tiles or TILES[q.shape[3]])
    texts = flash.Stretches(*flash.stretches(segment_ids, window))
    return flash.attention(flash.Walks(_forward, _by_queries, _by_keys), how, q, k, v, texts, flash.powers(sinks, q))


def _load_keys(tile: Tile, place: Place, ring: Ring, first_ref: Any, arrays: Sequence[Any], group: int) -> None:
    """Loads the keys and values of both groups' queries. group: query heads of a key head."""
    begin, *_, end = warpgroups.over_keys(tile, first_ref, place.row, place.base, place.base)

    def fetch(number: int, step: Any, slot: Any) -> None:
        some = pl.ds(pl.multiple_of((begin + step) * tile.walked, tile.walked), tile.walked)
        part = arrays[number].at[place.row, some, lax.div(place.head, group)]
        plgpu.copy_gmem_to_smem(part, ring.matrices[number].at[slot], ring.ready[number].at[slot])

    ring.fill(fetch, end - begin)


def _forward(
    how: _How, q: Array, k: Array, v: Array, texts: flash.Stretches, sinks: Array | None
) -> tuple[Array, Array]:
    """Returns the output, and [B, N, T] the binary logarithm of each query's mass."""
    (B, T, N, H), tile, wide = q.shape, how.tiles.forward, flash.wide(q)
    made = (jax.ShapeDtypeStruct(q.shape, q.dtype), jax.ShapeDtypeStruct((B, N, T), wide))
    scratch = (
        warpgroups.smem(how, GROUPS, tile.own, H, dtype=q.dtype),
        plgpu.SMEM((GROUPS, tile.own), wide),
        warpgroups.ring(how, tile, H, q.dtype),
        plgpu.Barrier(num_barriers=GROUPS),
        plgpu.Barrier(num_arrivals=GROUPS),
    )
    given = [q, k, v, texts.first] + ([] if sinks is None else [sinks])
    body, grid = functools.partial(_forward_kernel, how, N // k.shape[2]), (B, T // (GROUPS * tile.own), N)
    return warpgroups.call(how, body, given, made, scratch, grid, "flash_forward")


def _forward_kernel(how: _How, group: int, q_ref: Any, k_ref: Any, v_ref: Any, first_ref: Any, *refs: Any) -> None:
    *sinks, out_ref, mass_ref, q_smem, mass_smem, ring, q_ready, turns = refs
    tile = how.tiles.forward
    place = warpgroups.place(tile, backwards=q_ref.shape[1] // (GROUPS * tile.own))

    def multiply() -> None:
        mine, mass_mine = q_smem.at[place.group], mass_smem.at[place.group]
        plgpu.copy_gmem_to_smem(place.of(q_ref), mine, q_ready.at[place.group])
        walk = warpgroups.over_keys(tile, first_ref, place.row, place.base, place.mine)
        seen = warpgroups.seen_by_queries(tile, place, first_ref)
        plgpu.barrier_wait(q_ready.at[place.group])
        peak, mass, out = _attended(how, mine, ring, walk, seen, turns)
        high = peak * how.heat
        for sinks_ref in sinks:  # one array, or none
            sink, low = sinks_ref[place.head], high
            high = jnp.maximum(low, sink)
            shrink = jnp.exp2(low - high)
            mass, out = mass * shrink + jnp.exp2(sink - high), out * warpgroups.beside(shrink, out.shape, 0)
        mine[...] = (out * warpgroups.beside(1 / mass, out.shape, 0)).astype(mine.dtype)
        mass_mine[...] = high + jnp.log(mass) * math.log2(math.e)
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(mine, place.of(out_ref))
        plgpu.copy_smem_to_gmem(mass_mine, mass_ref.at[place.row, place.head, place.some])
        plgpu.wait_smem_to_gmem(0)

    warpgroups.by_group(multiply, lambda: _load_keys(tile, place, ring, first_ref, (k_ref, v_ref), group))


def _attended(how: _How, queries: Any, ring: Ring, walk: Walk, seen: Seen, turns: Any) -> tuple[Array, Array, Array]:
    """Returns peak, mass and mixed values of a group's queries. turns: the barrier at which the groups change places."""
    (k_smem, v_smem), (k_ready, v_ready), (k_free, v_free) = ring.matrices, ring.ready, ring.free
    (places, size, _), own, wide = k_smem.shape, queries.shape[0], flash.wide(queries)

    def change() -> None:
        plgpu.barrier_arrive(turns)
        plgpu.barrier_wait(turns)

    def skipped(at: Any) -> None:
        ring.skip(at)
        change()
        change()

    def step(block: Any, at: Any, carry: tuple) -> tuple:
        peak, mass, out = carry
        plgpu.barrier_wait(k_ready.at[at])
        raw, _ = warpgroups.product(queries, k_smem.at[at].transpose((1, 0)), change)
        plgpu.barrier_arrive(k_free.at[at])
        scores = seen.masked(how.scores(raw)[0], block * size)
        high = jnp.maximum(peak, jnp.max(scores, axis=1))
        weights = jnp.exp2(scores * how.heat - warpgroups.beside(high * how.heat, scores.shape, 0))
        shrink = jnp.exp2((peak - high) * how.heat)
        out, mass = out * warpgroups.beside(shrink, out.shape, 0), mass * shrink + jnp.sum(weights, axis=1)
        weights = weights.astype(queries.dtype)
        plgpu.barrier_arrive(turns)
        plgpu.barrier_wait(v_ready.at[at])
        plgpu.barrier_wait(turns)
        out = how.add(out, weights, v_smem.at[at])
        plgpu.barrier_arrive(v_free.at[at])
        return high, mass, out

    start = jnp.full((own,), LOWEST, wide), jnp.full((own,), 0, wide), jnp.full(queries.shape, 0, wide)
    pl.when(lax.axis_index("group") == 1)(change)
    made, _ = walk.run(places, step, skipped, start)
    pl.when(lax.axis_index("group") == 0)(change)
    return made


def _by_queries(how: _How, q: Array, k: Array, v: Array, texts: Any, slope: Array, mass: Array, dot: Array) -> Array:
    (B, T, N, H), tile = q.shape, how.tiles.by_queries
    scratch = (
        warpgroups.smem(how, GROUPS, tile.own, H, dtype=q.dtype),
        warpgroups.smem(how, GROUPS, tile.own, H, dtype=q.dtype),
        warpgroups.ring(how, tile, H, q.dtype),
        plgpu.Barrier(num_barriers=GROUPS, num_arrivals=2),
    )
    body, grid = functools.partial(_queries_kernel, how, N // k.shape[2]), (B, T // (GROUPS * tile.own), N)
    given, made = (q, k, v, texts.first, slope, mass, dot), jax.ShapeDtypeStruct(q.shape, q.dtype)
    return warpgroups.call(how, body, given, made, scratch, grid, "flash_backward_queries")


def _back(how: _How, products: Array, mass: Array, masked: Callable) -> tuple[Array, Array]:
    """Returns the weights of a pair of blocks, and their slopes by the products over `scale`. mass: as the products lie."""
    raw, bend = how.scores(products)
    weights = jnp.exp2(masked(raw) * how.heat - mass)
    return weights, weights * bend


def _queries_kernel(
    how: _How, group: int, q_ref, k_ref, v_ref, first_ref, slope_ref, mass_ref, dot_ref, made_ref, *scratch
) -> None:
    q_smem, slope_smem, ring, ready = scratch
    (k_smem, v_smem), (k_ready, v_ready), (k_free, v_free) = ring.matrices, ring.ready, ring.free
    tile = how.tiles.by_queries
    place = warpgroups.place(tile, backwards=q_ref.shape[1] // (GROUPS * tile.own))

    def multiply() -> None:
        queries, slopes, arrived = (x.at[place.group] for x in (q_smem, slope_smem, ready))
        plgpu.copy_gmem_to_smem(place.of(q_ref), queries, arrived)
        plgpu.copy_gmem_to_smem(place.of(slope_ref), slopes, arrived)
        walk = warpgroups.over_keys(tile, first_ref, place.row, place.base, place.mine)
        seen = warpgroups.seen_by_queries(tile, place, first_ref)
        mass, dot = (warpgroups.beside(place.numbers(ref), (tile.own, tile.walked), 0) for ref in (mass_ref, dot_ref))
        plgpu.barrier_wait(arrived)

        def step(block: Any, at: Any, made: Array) -> Array:
            plgpu.barrier_wait(k_ready.at[at])
            products, _ = warpgroups.product(queries, k_smem.at[at].transpose((1, 0)))
            plgpu.barrier_wait(v_ready.at[at])

            def weigh() -> Array:
                return _back(how, products, mass, lambda raw: seen.masked(raw, block * tile.walked))[1]

            by_weights, bent = warpgroups.product(slopes, v_smem.at[at].transpose((1, 0)), weigh)
            plgpu.barrier_arrive(v_free.at[at])
            by_products = bent * (by_weights - dot)
            made = how.add(made, by_products.astype(queries.dtype), k_smem.at[at])
            plgpu.barrier_arrive(k_free.at[at])
            return made

        start = jnp.full(queries.shape, 0, mass.dtype)
        made, _ = walk.run(tile.places, step, ring.skip, start)
        queries[...] = (made * how.scale).astype(queries.dtype)
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(queries, place.of(made_ref))
        plgpu.wait_smem_to_gmem(0)

    warpgroups.by_group(multiply, lambda: _load_keys(tile, place, ring, first_ref, (k_ref, v_ref), group))


def _by_keys(
    how: _How, q: Array, k: Array, v: Array, texts: Any, slope: Array, mass: Array, dot: Array
) -> tuple[Array, Array]:
    (B, T, N, H), K, tile = q.shape, k.shape[2], how.tiles.by_keys
    scratch = (
        warpgroups.smem(how, GROUPS, tile.own, H, dtype=q.dtype),
        warpgroups.smem(how, GROUPS, tile.own, H, dtype=q.dtype),
        warpgroups.ring(how, tile, H, q.dtype, mass.dtype),
        plgpu.Barrier(num_barriers=GROUPS, num_arrivals=2),
    )
    body, grid = functools.partial(_keys_kernel, how, N // K), (B, T // (GROUPS * tile.own), K)
    given, made = (q, k, v, texts.last, slope, mass, dot), tuple(jax.ShapeDtypeStruct(x.shape, x.dtype) for x in (k, v))
    return warpgroups.call(how, body, given, made, scratch, grid, "flash_backward_keys")


def _keys_kernel(
    how: _How, group: int, q_ref, k_ref, v_ref, last_ref, slope_ref, mass_ref, dot_ref, dk_ref, dv_ref, *scratch
) -> None:
    k_smem, v_smem, ring, ready = scratch
    tile = how.tiles.by_keys
    place = warpgroups.place(tile)

    def multiply() -> None:
        keys, values, arrived = (x.at[place.group] for x in (k_smem, v_smem, ready))
        plgpu.copy_gmem_to_smem(place.of(k_ref), keys, arrived)
        plgpu.copy_gmem_to_smem(place.of(v_ref), values, arrived)
        walk = warpgroups.over_queries(tile, last_ref, place.row, place.base, place.mine)
        seen = warpgroups.seen_by_keys(tile, place, last_ref)
        plgpu.barrier_wait(arrived)
        dk, dv = _summed(how, keys, values, ring, walk, seen, group)
        keys[...], values[...] = (dk * how.scale).astype(keys.dtype), dv.astype(values.dtype)
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(keys, place.of(dk_ref))
        plgpu.copy_smem_to_gmem(values, place.of(dv_ref))
        plgpu.wait_smem_to_gmem(0)

    def load() -> None:
        begin, *_, end = warpgroups.over_queries(tile, last_ref, place.row, place.base, place.base)
        steps = end - begin

        def fetch(line: int, step: Any, slot: Any) -> None:
            head, at = place.head * group + lax.div(step, steps), begin + lax.rem(step, steps)
            some = pl.ds(pl.multiple_of(at * tile.walked, tile.walked), tile.walked)
            matrix, numbers = ((q_ref, mass_ref), (slope_ref, dot_ref))[line]
            to, beside, arrived = (x[line].at[slot] for x in (ring.matrices, ring.numbers, ring.ready))
            plgpu.copy_gmem_to_smem(matrix.at[place.row, some, head], to, arrived)
            plgpu.copy_gmem_to_smem(numbers.at[place.row, head, some], beside, arrived)

        ring.fill(fetch, steps * group)

    warpgroups.by_group(multiply, load)


def _summed(how: _How, keys: Any, values: Any, ring: Ring, walk: Walk, seen: Seen, heads: int) -> tuple[Array, Array]:
    """Returns the gradients of a group's keys, over `scale`, and of its values. heads: of queries."""
    (q_smem, slope_smem), (mass_smem, dot_smem) = ring.matrices, ring.numbers
    (q_ready, slope_ready), (q_free, slope_free) = ring.ready, ring.free
    places, size, _ = q_smem.shape
    shape = keys.shape[0], size

    def head(_: Any, carry: tuple) -> tuple:
        def step(block: Any, place: Any, carry: tuple) -> tuple:
            dk, dv = carry
            plgpu.barrier_wait(q_ready.at[place])
            products, _ = warpgroups.product(keys, q_smem.at[place].transpose((1, 0)))
            mass = warpgroups.beside(plgpu.load(mass_smem.at[place]), shape, 1)
            weights, bent = _back(how, products, mass, lambda raw: seen.masked(raw, block * size))
            plgpu.barrier_wait(slope_ready.at[place])

            def mix(dv=dv) -> Array:
                return how.add(dv, weights.astype(keys.dtype), slope_smem.at[place])

            by_weights, dv = warpgroups.product(values, slope_smem.at[place].transpose((1, 0)), mix)
            by_products = bent * (by_weights - warpgroups.beside(plgpu.load(dot_smem.at[place]), shape, 1))
            plgpu.commit_smem()  # all threads have read the numbers before the TMA writes others
            plgpu.barrier_arrive(slope_free.at[place])
            dk = how.add(dk, by_products.astype(keys.dtype), q_smem.at[place])
            plgpu.barrier_arrive(q_free.at[place])
            return dk, dv

        sums, place = carry
        return walk.run(places, step, ring.skip, sums, place)

    nothing = jnp.full(keys.shape, 0, flash.wide(keys))
    return lax.fori_loop(0, heads, head, ((nothing, nothing), 0))[0]
