"""Attention of packed rows on NVIDIA GPUs, forward and backward, in Pallas-Triton.

Each block walks from the first block of the other side that it needs to the last (flash.py), and nothing of other segments is
read beyond those blocks. Where texts share their beginnings (branches.py), each block has a list of the blocks that it needs,
made before the kernels.

- forward: one block of queries and one head; online softmax (arXiv 2307.08691 algorithm 1); the log of the mass is kept.
- sinks: the score without a value joins a query's mass at the end of the forward pass (gpt-oss, arXiv 2508.10925). So the
  backward pass reads it from the log of the mass. The gradient of a sink is -sum of its weight times (slope . output).
- backward: scores are computed again. One kernel walks keys and makes the gradient of the queries. Another walks the
  queries of all heads of a key head and makes the gradients of keys and values. Nothing is added by atomics, so equal
  inputs give equal bits.

Blocks shrink as heads grow, because threads hold a block's sums in registers. The two products of 64 x 64 scores, with
heads of 128, take a streaming multiprocessor of an H100 about 500 cycles. An instruction on each of the scores takes 32
more, and a power 256. So scale and base are one factor, weights are powers of 2, and a mask is one selection. What is
multiplied next lies as the products leave it: the walk over queries has keys as its rows.

Memory beside arguments and results is two numbers for each head and token. Refuses shapes for which `serves` is False.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from jaxrl_post.kernels import flash
from jaxrl_post.kernels.branches import Branches, Visits, sees, visits
from jaxrl_post.kernels.flash import Stretches, stretches
from jaxrl_post.kernels.pallas_triton import pl, triton

NEEDS = "bfloat16 or float16, heads of 64, 128, 256 or 512, and rows of a multiple of 64 tokens"
UNSEEN = -1e30  # raw score of a key that a query does not see; beside one that it sees, the weight is 0


@dataclass(frozen=True)
class Tile:
    """What one program of a kernel takes at a time.

    - queries, keys: of the two blocks that it multiplies
    - warps, stages: that compute it, and that load ahead
    """

    queries: int
    keys: int
    warps: int = 4
    stages: int = 2


@dataclass(frozen=True)
class Tiles:
    """The tile of each kernel: forward, and backward by queries and by keys."""

    forward: Tile
    by_queries: Tile
    by_keys: Tile


def square(size: int) -> Tiles:
    """Returns tiles whose blocks all have `size` queries or keys."""
    return Tiles(*(Tile(size, size),) * 3)


BLOCK = 64
# Two sums of 64 x 128 numbers leave the walk over queries registers for half as many scores.
NARROW = Tiles(forward=Tile(BLOCK, BLOCK), by_queries=Tile(BLOCK, BLOCK), by_keys=Tile(BLOCK // 2, BLOCK))
# By head size, such that no register is spilled on GPUs of 163 KB of shared memory and more. SMALL: on those of 99 KB.
TILES = {
    64: NARROW,
    128: NARROW,
    256: Tiles(Tile(64, 64, warps=8), Tile(64, 32, warps=8), Tile(64, 32, warps=8)),
    512: Tiles(Tile(64, 32, warps=8), Tile(32, 32, warps=8), Tile(16, 32, warps=8)),
}
SMALL = TILES | {
    256: Tiles(Tile(64, 32, warps=8), Tile(32, 32, warps=8), Tile(32, 32, warps=8)),
    512: Tiles(Tile(64, 16, warps=8), Tile(32, 16, warps=8), Tile(16, 32, warps=8)),
}


def serves(dtype: Any, heads: int, kv_heads: int, head_dim: int, tokens: int) -> bool:
    return jnp.dtype(dtype).itemsize == 2 and head_dim in TILES and tokens % BLOCK == 0 and heads % kv_heads == 0


@dataclass(frozen=True)
class _How(flash.How):
    tiles: Tiles

    def power(self, x: Array) -> Array:
        """Returns 2 to the power of x. On a GPU it is one instruction, for which numbers below 2**-126 are 0."""
        if self.interpret:
            return jnp.exp2(x)
        [out] = triton.elementwise_inline_asm(
            "ex2.approx.ftz.f32 $0, $1;",
            args=[x],
            constraints="=f,f",
            pack=1,
            result_shape_dtypes=[jax.ShapeDtypeStruct(x.shape, x.dtype)],
        )
        return out


def attention(
    q: Float[Array, "B T N H"],
    k: Float[Array, "B S K H"],
    v: Float[Array, "B S K H"],
    texts: Int[Array, "B T"] | Branches,
    sinks: Float[Array, " N"] | None = None,
    *,
    scale: float,
    window: int | None,
    soft_cap: float | None,
    saved: str = "attended",
    tiles: Mapping[int, Tiles] | Tiles = TILES,
    interpret: bool = False,
) -> Float[Array, "B T N H"]:
    """Returns causal attention inside the segments of packed rows, or of each text to its beginnings and itself.

    Args:
      texts: segment ids, or how texts branch.
      sinks: for each query head a score without a value, neither scaled nor capped.
      scale: above 0.
      window: a query sees its own position and the window - 1 before it.
      saved: name under which a remat policy may keep the output and the log of the mass.
      tiles: their sizes must divide T. A mapping has those of each head size.
      interpret: True runs without a device, in any dtype.

    Raises:
      ValueError: the scale is 0 or below, for which a key that is not seen would count.
    """
    chosen = tiles if isinstance(tiles, Tiles) else tiles[q.shape[3]]
    how, own = _How(scale, window, soft_cap, saved, interpret, chosen), flash.powers(sinks, q)
    walks = flash.Walks(_forward, _by_queries, _by_keys)
    if not isinstance(texts, Branches):
        return flash.attention(walks, how, q, k, v, Stretches(*stretches(texts, window)), own)
    by_queries, by_keys = (
        visits(texts, tile.queries, tile.keys, window)[side]
        for side, tile in enumerate((chosen.by_queries, chosen.by_keys))
    )
    forward = visits(texts, chosen.forward.queries, chosen.forward.keys, window)[0]
    near = None if window is None else (texts.queries.positions, texts.keys.positions)
    places = texts.queries.places, texts.keys.places
    branching = Branching(texts.until, *places, near, forward, by_queries, by_keys)
    return flash.attention(walks, how, q, k, v, branching, own)


class Branching(NamedTuple):
    """Of texts that share beginnings:

    - until: of each key
    - queries, keys: the places of both sides. A block of either stands in one stretch of the row
    - near: with a window, the positions of queries and of keys
    - the others: what each kernel's blocks meet
    """

    until: Int[Array, "B keys"]
    queries: Int[Array, "B queries"]
    keys: Int[Array, "B keys"]
    near: tuple[Int[Array, "B queries"], Int[Array, "B keys"]] | None
    forward: Visits
    by_queries: Visits
    by_keys: Visits


def _product(a: Array, b: Array) -> Array:
    """Multiplies two blocks; float32 and wider in full."""
    exact = None if a.dtype.itemsize == 2 else lax.Precision.HIGHEST
    return jnp.dot(a, b, preferred_element_type=flash.wide(a), precision=exact)


def _call(how: _How, tile: Tile, kernel: Any, grid: tuple, given: list, made: Any, name: str) -> Any:
    specs = [spec for spec, _ in given]
    shapes, outs = (
        jax.tree.map(lambda pair: pair[1], made, is_leaf=_is_pair),
        jax.tree.map(lambda pair: pair[0], made, is_leaf=_is_pair),
    )
    return pl.pallas_call(
        functools.partial(kernel, how, tile),
        grid=grid,
        in_specs=specs,
        out_specs=outs,
        out_shape=shapes,
        compiler_params=triton.CompilerParams(num_warps=tile.warps, num_stages=tile.stages),
        interpret=how.interpret,
        name=name,
    )(*(array for _, array in given))


def _is_pair(x: Any) -> bool:
    return isinstance(x, tuple) and len(x) == 2 and isinstance(x[0], pl.BlockSpec)


def _specs(tile: Tile, q: Array, k: Array) -> dict[str, pl.BlockSpec]:
    """Returns what a block of the grid (block of tokens, row, query head) sees."""
    T, H, group, size = k.shape[1], q.shape[3], q.shape[2] // k.shape[2], tile.queries
    return {
        "queries": pl.BlockSpec((None, size, None, H), lambda i, b, n: (b, i, n, 0)),
        "keys": pl.BlockSpec((None, T, None, H), lambda i, b, n: (b, 0, n // group, 0)),
        "numbers": pl.BlockSpec((None, None, size), lambda i, b, n: (b, n, i)),
        "sinks": pl.BlockSpec((q.shape[2],), lambda i, b, n: (0,)),
    }


def _whole(x: Array) -> tuple[Any, Array]:
    """Returns all of a row's numbers as an argument of a kernel, in any grid whose second axis is that of rows."""
    return pl.BlockSpec((None, *x.shape[1:]), lambda _, b, n: (b, *(0,) * (x.ndim - 1))), x


def _of_branches(texts: Branching, meets: Visits) -> list[tuple[Any, Array]]:
    return [_whole(x) for x in (*meets, texts.until, texts.queries, texts.keys, *(texts.near or ()))]


def _forward(
    how: _How, q: Array, k: Array, v: Array, texts: Stretches | Branching, sinks: Array | None
) -> tuple[Array, Array]:
    """Returns the output, and [B, N, T] the binary logarithm of each query's mass. Sinks are binary logarithms too."""
    (B, T, N, _), tile = q.shape, how.tiles.forward
    at = _specs(tile, q, k)
    given = [(at["queries"], q), (at["keys"], k), (at["keys"], v)]
    masked = _of_branches(texts, texts.forward) if isinstance(texts, Branching) else [_whole(texts.first)]
    given += masked + ([] if sinks is None else [(at["sinks"], sinks)])
    mass = (at["numbers"], jax.ShapeDtypeStruct((B, N, T), flash.wide(q)))
    made = ((at["queries"], jax.ShapeDtypeStruct(q.shape, q.dtype)), mass)
    kernel = functools.partial(_forward_kernel, len(masked))
    return _call(how, tile, kernel, (T // tile.queries, B, N), given, made, "flash_forward")


def _by_queries(how: _How, q, k, v, texts: Stretches | Branching, slope, mass, dot) -> Array:
    (B, T, N, _), tile = q.shape, how.tiles.by_queries
    at = _specs(tile, q, k)
    given = [(at["queries"], q), (at["keys"], k), (at["keys"], v)]
    given += [(at["queries"], slope), (at["numbers"], mass), (at["numbers"], dot)]
    given += _of_branches(texts, texts.by_queries) if isinstance(texts, Branching) else [_whole(texts.first)]
    made = (at["queries"], jax.ShapeDtypeStruct(q.shape, q.dtype))
    return _call(how, tile, _queries_kernel, (T // tile.queries, B, N), given, made, "flash_backward_queries")


def _by_keys(how: _How, q, k, v, texts: Stretches | Branching, slope, mass, dot) -> tuple[Array, Array]:
    (B, T, N, H), K, tile = q.shape, k.shape[2], how.tiles.by_keys
    keys = pl.BlockSpec((None, tile.keys, None, H), lambda j, b, h: (b, j, h, 0))
    queries = pl.BlockSpec((None, T, N // K, H), lambda j, b, h: (b, 0, h, 0))
    numbers = pl.BlockSpec((None, N // K, T), lambda j, b, h: (b, h, 0))
    given = [(queries, q), (keys, k), (keys, v), (queries, slope), (numbers, mass), (numbers, dot)]
    given += _of_branches(texts, texts.by_keys) if isinstance(texts, Branching) else [*map(_whole, texts)]
    made = tuple((keys, jax.ShapeDtypeStruct(x.shape, x.dtype)) for x in (k, v))
    return _call(how, tile, _keys_kernel, (k.shape[1] // tile.keys, B, K), given, made, "flash_backward_keys")


def _seen(own: Array, other: Array, first: Array) -> Array:
    """Returns where queries `own` see keys `other`: positions along axes of their own. `first`: of each query."""
    return (other >= first) & (other <= own)


def _places(number: Any, size: int) -> Array:
    """Returns the positions of a block."""
    return number * size + jnp.arange(size)


def _block_of(position: Array, size: int) -> Array:
    return lax.div(position, jnp.asarray(size, position.dtype))


class _Walk(NamedTuple):
    """The turns of a block's walk: from `begin` to before `end`. block: what a turn meets. seen: which pairs of it count."""

    begin: Any
    end: Any
    block: Callable
    seen: Callable


def _along(how: _How, queries: Any, keys: Any, refs: Any, axis: int) -> Array:
    """Returns which queries see which keys along branches: two stretches of the arrays. Queries lie along `axis`."""
    until_ref, queries_ref, keys_ref, *near = refs

    def of_queries(ref: Any) -> Array:
        return jnp.expand_dims(ref[queries], 1 - axis)

    def of_keys(ref: Any) -> Array:
        return jnp.expand_dims(ref[keys], axis)

    own = of_queries(queries_ref)
    behind = of_queries(near[0]) - of_keys(near[1]) if near else None
    return (of_keys(keys_ref) <= own) & sees(own, of_keys(until_ref), behind, how.window)


def _over_keys(how: _How, tile: Tile, refs: Any) -> _Walk:
    """Returns the walk of this block of queries. seen: bool[queries, keys]."""
    size, number = tile.queries, pl.program_id(0)
    if len(refs) > 1:
        numbers_ref, counts_ref, *others = refs

        def among(j):
            return _along(how, pl.ds(number * size, size), pl.ds(j * tile.keys, tile.keys), others, 0)

        return _Walk(0, counts_ref[number], lambda turn: numbers_ref[number, turn], among)
    [first_ref], own = refs, _places(number, size)
    first, begin = first_ref[pl.ds(number * size, size)], number * size
    bounds = _block_of(first_ref[begin], tile.keys), _block_of(begin + size - 1, tile.keys) + 1
    return _Walk(*bounds, lambda j: j, lambda j: _seen(own[:, None], _places(j, tile.keys)[None, :], first[:, None]))


def _over_queries(how: _How, tile: Tile, refs: Any) -> _Walk:
    """Returns the walk of this block of keys. seen: bool[keys, queries]."""
    size, number = tile.queries, pl.program_id(0)
    begin, other = number * tile.keys, _places(number, tile.keys)
    if len(refs) > 2:
        numbers_ref, counts_ref, *others = refs

        def among(i):
            return _along(how, pl.ds(i * size, size), pl.ds(begin, tile.keys), others, 1)

        return _Walk(0, counts_ref[number], lambda turn: numbers_ref[number, turn], among)
    first_ref, last_ref = refs
    end = _block_of(last_ref[begin + tile.keys - 1], size) + 1

    def seen(i):
        return _seen(_places(i, size)[None, :], other[:, None], first_ref[pl.ds(i * size, size)][None, :])

    return _Walk(_block_of(begin, size), end, lambda i: i, seen)


def _forward_kernel(masks: int, how: _How, tile: Tile, q_ref, k_ref, v_ref, *refs):
    *sinks, out_ref, mass_ref = refs[masks:]
    size = tile.queries
    q, keys = q_ref[...], _over_keys(how, tile, refs[:masks])
    wide = flash.wide(q)

    def walk(turn, carry):
        peak, mass, out = carry
        j = keys.block(turn)
        some = pl.ds(j * tile.keys, tile.keys)
        k, v = k_ref[some, :], v_ref[some, :]
        seen = keys.seen(j)
        scores = jnp.where(seen, how.scores(_product(q, k.T))[0], UNSEEN)
        high = jnp.maximum(peak, jnp.max(scores, axis=1))
        weights = how.power((scores - high[:, None]) * how.heat)
        shrink = how.power((peak - high) * how.heat)
        mixed = _product(weights.astype(v.dtype), v)
        return high, mass * shrink + jnp.sum(weights, axis=1), out * shrink[:, None] + mixed

    start = (jnp.full((size,), UNSEEN, wide), jnp.zeros((size,), wide), jnp.zeros(q.shape, wide))
    peak, mass, out = lax.fori_loop(keys.begin, keys.end, walk, start)
    high = None
    for sinks_ref in sinks:  # one array, or none
        sink, low = sinks_ref[pl.program_id(2)], peak * how.heat
        high = jnp.maximum(low, sink)
        shrink = how.power(low - high)
        mass, out = mass * shrink + how.power(sink - high), out * shrink[:, None]
    out_ref[...] = (out / mass[:, None]).astype(out_ref.dtype)
    mass_ref[...] = (peak * how.heat if high is None else high) + jnp.log2(mass)


def _back(how: _How, scores: Array, slopes: Array, mass: Array, dot: Array, seen: Array) -> tuple[Array, Array]:
    """Returns the weights of a pair of blocks, and the gradient of its products over `scale`.

    Args:
      scores, slopes: products of queries and keys, and of the output's slope and values.
      mass, dot: of the queries, along their axis.
    """
    raw, bend = how.scores(scores)
    weights = how.power(jnp.where(seen, raw, UNSEEN) * how.heat - mass)
    return weights, weights * (slopes - dot) * bend


def _queries_kernel(how: _How, tile: Tile, q_ref, k_ref, v_ref, slope_ref, mass_ref, dot_ref, *refs):
    *masks, made_ref = refs
    q, slope, mass, dot = q_ref[...], slope_ref[...], mass_ref[...], dot_ref[...]
    keys = _over_keys(how, tile, masks)

    def walk(turn, made):
        j = keys.block(turn)
        some = pl.ds(j * tile.keys, tile.keys)
        k, v = k_ref[some, :], v_ref[some, :]
        seen = keys.seen(j)
        _, products = _back(how, _product(q, k.T), _product(slope, v.T), mass[:, None], dot[:, None], seen)
        return made + _product(products.astype(k.dtype), k)

    made = lax.fori_loop(keys.begin, keys.end, walk, jnp.zeros(q.shape, flash.wide(q)))
    made_ref[...] = (made * how.scale).astype(made_ref.dtype)


def _keys_kernel(how: _How, tile: Tile, q_ref, k_ref, v_ref, slope_ref, mass_ref, dot_ref, *refs):
    *masks, dk_ref, dv_ref = refs
    size = tile.queries
    k, v, queries = k_ref[...], v_ref[...], _over_queries(how, tile, masks)

    def head(n, carry):
        def walk(turn, carry):
            dk, dv = carry
            i = queries.block(turn)
            some = pl.ds(i * size, size)
            q, slope = q_ref[some, n, :], slope_ref[some, n, :]
            seen = queries.seen(i)
            mass, dot = mass_ref[n, some][None, :], dot_ref[n, some][None, :]
            weights, products = _back(how, _product(k, q.T), _product(v, slope.T), mass, dot, seen)
            dv = dv + _product(weights.astype(q.dtype), slope)
            return dk + _product(products.astype(q.dtype), q), dv

        return lax.fori_loop(queries.begin, queries.end, walk, carry)

    nothing = jnp.zeros(k.shape, flash.wide(k))
    dk, dv = lax.fori_loop(0, q_ref.shape[1], head, (nothing, nothing))
    dk_ref[...], dv_ref[...] = (dk * how.scale).astype(dk_ref.dtype), dv.astype(dv_ref.dtype)
