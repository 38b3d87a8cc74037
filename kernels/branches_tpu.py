"""Attention of packed rows whose texts share their beginnings (branches.py) on TPUs, in Pallas: forward and backward.

A visit takes one row, one head, one block of queries and one block of keys that some of them see. Lists of such blocks are
made before the kernels and lie in scalar memory, so blocks of other branches are neither read nor multiplied.

Scores lie with keys as rows and queries as lanes. So what belongs to a query is a row of numbers, and softmax is over
rows (arXiv 2307.08691, algorithms 1 and 2). The backward pass computes scores again from the log of the mass. One kernel
sums the gradient of queries, another those of keys and values. Nothing is added by atomics: equal inputs give equal bits.

Sinks join a query's mass at the end (gpt-oss, arXiv 2508.10925). Refuses shapes for which `serves` is False.
"""

from __future__ import annotations

import functools
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float

from jaxrl_post.kernels import flash_tpu
from jaxrl_post.kernels.branches import Branches, sees, visits
from jaxrl_post.kernels.pallas_tpu import pl, pltpu

LANES, LEAST = 128, 256  # lists of smaller blocks would fill scalar memory
NEEDS = f"bfloat16 or float32, heads of 64, 128, 256 or 512, and stretches of rows of a multiple of {LEAST} tokens"
UNSEEN = -1e30  # score of a key that a query does not see; beside one that it sees, the weight is 0
MEMORY = 56 << 20  # of the chip, that a kernel may use


def serves(dtype: Any, heads: int, kv_heads: int, head_dim: int, tokens: int) -> bool:
    """Returns whether the kernels have such shapes. tokens: of a row, or of the stretches of one in parts."""
    return flash_tpu.serves(dtype, heads, kv_heads, head_dim, tokens) and tokens % LEAST == 0


class How(NamedTuple):
    """What is fixed when the kernels are compiled. own, other: tokens of the side that stays in the chip, and of the walked one."""

    scale: float
    window: int | None
    soft_cap: float | None
    own: int
    other: int
    saved: str
    interpret: bool

    def scores(self, product: Array) -> tuple[Array, Array | float]:
        """Returns scores of products of queries and keys, and the slope of a score by its product."""
        if self.soft_cap is None:
            return product * self.scale, self.scale
        bent = jnp.tanh(product * (self.scale / self.soft_cap))
        return self.soft_cap * bent, self.scale * (1 - bent * bent)


def attention(
    q: Float[Array, "B T N H"],
    k: Float[Array, "B S K H"],
    v: Float[Array, "B S K H"],
    branches: Branches,
    sinks: Float[Array, " N"] | None = None,
    *,
    scale: float,
    window: int | None,
    soft_cap: float | None,
    saved: str = "attended",
    own: int = flash_tpu.OWN,
    other: int = flash_tpu.OTHER,
    interpret: bool = False,
) -> Float[Array, "B T N H"]:
    """Returns causal attention of each text to its beginnings and itself.

    Args:
      sinks: for each query head a score without a value, neither scaled nor capped.
      window: a query sees its own position and the window - 1 before it in its text.
      saved: name under which a remat policy may keep the output and the log of the mass.
      own, other: most tokens of a block that stays in the chip, and of one that is walked.
      interpret: True runs without a device.
    """
    if q.shape[3] > 2 * LANES:  # the sums of a block take as much of the chip as its scores
        own = min(own, 512)
    how = How(scale, window, soft_cap, *(math.gcd(branches.stretch, size) for size in (own, other)), saved, interpret)
    heads = (jnp.swapaxes(x, 1, 2) for x in (q, k, v))
    score = None if sinks is None else sinks.astype(_wide(q))
    return jnp.swapaxes(_attention(how, *heads, branches, score), 1, 2)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attention(how: How, q: Array, k: Array, v: Array, branches: Branches, sinks: Array | None) -> Array:
    return _forward(how, q, k, v, branches, sinks)[0]


def _kept(how: How, q: Array, k: Array, v: Array, branches: Branches, sinks: Array | None) -> tuple[Array, tuple]:
    out, mass = (checkpoint_name(x, how.saved) for x in _forward(how, q, k, v, branches, sinks))
    return out, (q, k, v, branches, sinks, out, mass)


def _gradients(how: How, kept: tuple, slope: Array) -> tuple:
    q, k, v, branches, sinks, out, mass = kept
    wide = _wide(q)
    dot = jnp.sum(slope.astype(wide) * out.astype(wide), axis=-1)[:, :, None]  # [B, N, 1, T], as the mass
    dq = _by_queries(how, q, k, v, branches, slope, mass, dot)
    dk, dv = _by_keys(how, q, k, v, branches, slope, mass, dot)
    if sinks is None:
        return dq, dk, dv, None, None
    return dq, dk, dv, None, -jnp.sum(jnp.exp(sinks[:, None, None] - mass) * dot, axis=(0, 2, 3))


_attention.defvjp(_kept, _gradients)


def _wide(x: Array) -> Any:
    return jnp.promote_types(x.dtype, jnp.float32)


def _product(a: Array, b: Array, over: tuple[int, int]) -> Array:
    """Returns the product of two matrices over one axis of each; that of float32 and wider in full."""
    exact = None if a.dtype.itemsize == 2 else lax.Precision.HIGHEST
    return lax.dot_general(a, b, ((over[:1], over[1:]), ((), ())), precision=exact, preferred_element_type=_wide(a))


class _Walk(NamedTuple):
    """A grid (row, head, own block, visit) and how its blocks lie. The walked block is that of the visit."""

    own: int
    other: int
    blocks: int
    steps: int

    def walked(self, b: Any, i: Any, s: Any, numbers: Any) -> Any:
        return numbers[(b * self.blocks + i) * self.steps + s]

    def here(self, lists: _Lists) -> Any:
        """Returns whether there is such a visit."""
        return pl.program_id(3) < lists.counts[pl.program_id(0) * self.blocks + pl.program_id(2)]

    def places(self, lists: _Lists) -> tuple[Any, Any]:
        """Returns the first places of the own block and of the one that is walked."""
        b, i, s = (pl.program_id(axis) for axis in (0, 2, 3))
        other = lists.other[b * self.steps + self.walked(b, i, s, lists.numbers)]
        return lists.own[b * self.blocks + i], other


class _Lists(NamedTuple):
    """What lies in scalar memory: visits, and the first places of own and of walked blocks."""

    numbers: Any
    counts: Any
    own: Any
    other: Any


def _call(
    how: How, walk: _Walk, kernel: Any, grid: tuple, lists: _Lists, given: list, made: list, scratch: list, name: str
) -> Any:
    flat = [x.reshape(-1) for x in lists]

    def run(*refs: Any) -> None:
        kernel(how, walk, _Lists(*refs[: len(flat)]), *refs[len(flat) :])

    return pl.pallas_call(
        run,
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=len(flat),
            grid=grid,
            in_specs=[spec for spec, _ in given],
            out_specs=[spec for spec, _ in made],
            scratch_shapes=scratch,
        ),
        out_shape=[shape for _, shape in made],
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel", "parallel", "parallel", *["arbitrary"] * (len(grid) - 3)),
            vmem_limit_bytes=MEMORY,
        ),
        interpret=how.interpret,
        name=name,
    )(*flat, *(array for _, array in given))


def _upright(x: Array) -> Array:
    """Returns a number of every token [B, T] as a column in each lane."""
    return jnp.broadcast_to(x[..., None], (*x.shape, LANES))


def _of_keys(how: How, branches: Branches) -> list[Array]:
    """Returns what masks read: `until` of keys, and with a window the positions of keys and of queries."""
    near = [] if how.window is None else [_upright(branches.keys.positions), branches.queries.positions[:, None]]
    return [_upright(branches.until), *near]


def _mask(how: How, shape: tuple[int, int], query: Any, key: Any, refs: Any) -> Array:
    """Returns which queries (lanes), from place `query` on, see which keys (rows), from place `key` on."""
    own = query + lax.broadcasted_iota(jnp.int32, shape, 1)
    other = key + lax.broadcasted_iota(jnp.int32, shape, 0)
    until, *near = refs
    behind = near[1][...] - near[0][:, :1] if near else None
    return (other <= own) & sees(own, until[:, :1], behind, how.window)


def _walked_keys(how: How, q: Array, k: Array) -> tuple[_Walk, dict[str, Any], tuple]:
    """Returns walk, blocks and grid of the kernels in which queries stay."""
    (B, N, T, H), group = q.shape, q.shape[1] // k.shape[1]
    walk = _Walk(how.own, how.other, T // how.own, k.shape[2] // how.other)
    at = {
        "queries": pl.BlockSpec((None, None, walk.own, H), lambda b, n, i, s, *_: (b, n, i, 0)),
        "keys": pl.BlockSpec(
            (None, None, walk.other, H),
            lambda b, n, i, s, numbers, *_: (b, n // group, walk.walked(b, i, s, numbers), 0),
        ),
        "column": pl.BlockSpec(
            (None, walk.other, LANES), lambda b, n, i, s, numbers, *_: (b, walk.walked(b, i, s, numbers), 0)
        ),
        "line": pl.BlockSpec((None, 1, walk.own), lambda b, n, i, s, *_: (b, 0, i)),
        "numbers": pl.BlockSpec((None, None, 1, walk.own), lambda b, n, i, s, *_: (b, n, 0, i)),
    }
    return walk, at, (B, N, walk.blocks, walk.steps)


def _of_queries(how: How, branches: Branches) -> _Lists:
    """Returns the lists of kernels in which queries stay."""
    own, other = branches.queries.first_places(how.own), branches.keys.first_places(how.other)
    return _Lists(*visits(branches, how.own, how.other, how.window)[0], own, other)


def _forward(how: How, q: Array, k: Array, v: Array, branches: Branches, sinks: Array | None) -> list[Array]:
    """Returns the output [B, N, T, H], and the log of each query's mass [B, N, 1, T]."""
    (B, N, T, H), wide = q.shape, _wide(q)
    walk, at, grid = _walked_keys(how, q, k)
    given = [(at["queries"], q), (at["keys"], k), (at["keys"], v)]
    given += list(zip((at["column"], at["column"], at["line"]), _of_keys(how, branches), strict=False))
    if sinks is not None:
        given += [(pl.BlockSpec(memory_space=pltpu.SMEM), sinks)]
    made = [(at["queries"], jax.ShapeDtypeStruct(q.shape, q.dtype))]
    made += [(at["numbers"], jax.ShapeDtypeStruct((B, N, 1, T), wide))]
    scratch = [pltpu.VMEM(shape, wide) for shape in ((1, walk.own), (1, walk.own), (H, walk.own))]
    kernel = functools.partial(_forward_kernel, sinks is not None)
    return _call(how, walk, kernel, grid, _of_queries(how, branches), given, made, scratch, "branches_forward")


def _forward_kernel(has_sinks: bool, how: How, walk: _Walk, lists: _Lists, q_ref, k_ref, v_ref, *refs):
    *refs, out_ref, mass_ref, peak_ref, sum_ref, mixed_ref = refs
    sinks, refs = (refs[-1], refs[:-1]) if has_sinks else (None, refs)
    n, s, places = pl.program_id(1), pl.program_id(3), walk.places(lists)

    @pl.when(s == 0)
    def _begin():
        peak_ref[...] = jnp.full_like(peak_ref, UNSEEN)
        sum_ref[...] = jnp.zeros_like(sum_ref)
        mixed_ref[...] = jnp.zeros_like(mixed_ref)

    @pl.when(walk.here(lists))
    def _visit():
        k, v = k_ref[...], v_ref[...]
        product = _product(k, q_ref[...], (1, 1))
        mask = _mask(how, product.shape, *places, refs)
        scores = jnp.where(mask, how.scores(product)[0], UNSEEN)
        peak = peak_ref[...]
        high = jnp.maximum(peak, jnp.max(scores, axis=0, keepdims=True))
        weights, shrink = jnp.exp(scores - high), jnp.exp(peak - high)
        peak_ref[...] = high
        sum_ref[...] = sum_ref[...] * shrink + jnp.sum(weights, axis=0, keepdims=True)
        mixed_ref[...] = mixed_ref[...] * shrink + _product(v, weights.astype(v.dtype), (0, 0))

    @pl.when(s == walk.steps - 1)
    def _end():
        high, mass, mixed = peak_ref[...], sum_ref[...], mixed_ref[...]
        if sinks is not None:
            peak, high = high, jnp.maximum(high, sinks[n])
            shrink = jnp.exp(peak - high)
            mass, mixed = mass * shrink + jnp.exp(sinks[n] - high), mixed * shrink
        out_ref[...] = (mixed / mass).T.astype(out_ref.dtype)
        mass_ref[...] = high + jnp.log(mass)


def _back(how: How, k, v, q, slope, mass: Array, dot: Array, mask: Array) -> tuple[Array, Array]:
    """Returns the weights of a pair of blocks, and the gradient of its products: keys as rows, queries as lanes."""
    scores, bend = how.scores(_product(k, q, (1, 1)))
    weights = jnp.exp(jnp.where(mask, scores, UNSEEN) - mass)
    return weights, weights * (_product(v, slope, (1, 1)) - dot) * bend


def _by_queries(how: How, q, k, v, branches: Branches, slope, mass, dot) -> Array:
    walk, at, grid = _walked_keys(how, q, k)
    given = [(at["queries"], q), (at["keys"], k), (at["keys"], v), (at["queries"], slope)]
    given += [(at["numbers"], mass), (at["numbers"], dot)]
    given += list(zip((at["column"], at["column"], at["line"]), _of_keys(how, branches), strict=False))
    made = [(at["queries"], jax.ShapeDtypeStruct(q.shape, q.dtype))]
    scratch = [pltpu.VMEM((q.shape[3], walk.own), _wide(q))]
    lists = _of_queries(how, branches)
    return _call(how, walk, _queries_kernel, grid, lists, given, made, scratch, "branches_backward_queries")[0]


def _queries_kernel(how: How, walk: _Walk, lists: _Lists, q_ref, k_ref, v_ref, slope_ref, mass_ref, dot_ref, *refs):
    *refs, made_ref, sum_ref = refs
    s, places = pl.program_id(3), walk.places(lists)

    @pl.when(s == 0)
    def _begin():
        sum_ref[...] = jnp.zeros_like(sum_ref)

    @pl.when(walk.here(lists))
    def _visit():
        k = k_ref[...]
        mask = _mask(how, (walk.other, walk.own), *places, refs)
        given = k, v_ref[...], q_ref[...], slope_ref[...], mass_ref[...], dot_ref[...]
        sum_ref[...] += _product(k, _back(how, *given, mask)[1].astype(k.dtype), (0, 0))

    @pl.when(s == walk.steps - 1)
    def _end():
        made_ref[...] = sum_ref[...].T.astype(made_ref.dtype)


def _by_keys(how: How, q, k, v, branches: Branches, slope, mass, dot) -> list[Array]:
    """Returns the gradients of keys and values, each summed over the query heads of its key head."""
    (B, N, T, H), K = q.shape, k.shape[1]
    group, walk = N // K, _Walk(how.own, how.other, k.shape[2] // how.own, T // how.other)
    keys = pl.BlockSpec((None, None, walk.own, H), lambda b, h, j, s, g, *_: (b, h, j, 0))

    def head(b: Any, h: Any, j: Any, s: Any, g: Any, counts: Any) -> Any:
        """Returns the query head of a visit. Behind the last visit it stays, so that nothing more is read."""
        return h * group + jnp.where(s < counts[b * walk.blocks + j], g, group - 1)

    queries = pl.BlockSpec(
        (None, None, walk.other, H),
        lambda b, h, j, s, g, numbers, counts, *_: (b, head(b, h, j, s, g, counts), walk.walked(b, j, s, numbers), 0),
    )
    lines = pl.BlockSpec(
        (None, None, 1, walk.other),
        lambda b, h, j, s, g, numbers, counts, *_: (b, head(b, h, j, s, g, counts), 0, walk.walked(b, j, s, numbers)),
    )
    column = pl.BlockSpec((None, walk.own, LANES), lambda b, h, j, s, g, *_: (b, j, 0))
    line = pl.BlockSpec((None, 1, walk.other), lambda b, h, j, s, g, numbers, *_: (b, 0, walk.walked(b, j, s, numbers)))
    given = [(queries, q), (keys, k), (keys, v), (queries, slope), (lines, mass), (lines, dot)]
    given += list(zip((column, column, line), _of_keys(how, branches), strict=False))
    made = [(keys, jax.ShapeDtypeStruct(x.shape, x.dtype)) for x in (k, v)]
    scratch = [pltpu.VMEM((walk.own, H), _wide(q))] * 2
    own, other = branches.keys.first_places(how.own), branches.queries.first_places(how.other)
    lists = _Lists(*visits(branches, how.other, how.own, how.window)[1], own, other)
    grid = (B, K, walk.blocks, walk.steps, group)
    return _call(how, walk, _keys_kernel, grid, lists, given, made, scratch, "branches_backward_keys")


def _keys_kernel(how: How, walk: _Walk, lists: _Lists, q_ref, k_ref, v_ref, slope_ref, mass_ref, dot_ref, *refs):
    *refs, dk_ref, dv_ref, k_sum, v_sum = refs
    s, g, (keys, queries) = pl.program_id(3), pl.program_id(4), walk.places(lists)

    @pl.when((s == 0) & (g == 0))
    def _begin():
        k_sum[...], v_sum[...] = jnp.zeros_like(k_sum), jnp.zeros_like(v_sum)

    @pl.when(walk.here(lists))
    def _visit():
        q, slope = q_ref[...], slope_ref[...]
        mask = _mask(how, (walk.own, walk.other), queries, keys, refs)
        given = k_ref[...], v_ref[...], q, slope, mass_ref[...], dot_ref[...]
        weights, products = _back(how, *given, mask)
        v_sum[...] += _product(weights.astype(slope.dtype), slope, (1, 0))
        k_sum[...] += _product(products.astype(q.dtype), q, (1, 0))

    @pl.when((s == walk.steps - 1) & (g == pl.num_programs(4) - 1))
    def _end():
        dk_ref[...], dv_ref[...] = k_sum[...].astype(dk_ref.dtype), v_sum[...].astype(dv_ref.dtype)
