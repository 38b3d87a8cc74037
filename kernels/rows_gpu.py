"""What rows need between two products of a decode step, in Pallas-Triton: one kernel each.

- normed: adds a product to the stream, and norms it
- packed: adds biases, norms and rotates queries and keys, writes keys and values to their pages, and packs queries for attention
- combined: adds the stretches of positions that attention walked apart

A product comes in parts, float32 [P, R, outputs]: few rows fill a GPU only where several blocks of threads share a sum. The parts
are added in their order. So a number follows from its row alone, and from the number of parts.

Rounding is that of the jnp forms (models/layer.py, kernels/attention_gpu.py): a product, a sum and a norm each end in the dtype
of activations, and norms and rotation are float32.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from jaxrl_post.kernels.pallas_triton import pl, triton
from jaxrl_post.kernels.sinks import joined

BIG_NEGATIVE = -1e30
TILE = 64  # rows and outputs of a block of a product
BLOCKS = 264  # blocks of threads that fill an H100 of 132 multiprocessors, two on each
MOST_PARTS = 8
LEAST_INPUTS = 128  # of a part


def parts(rows: int, inputs: int, outputs: int) -> int:
    """Returns in how many parts a product is summed: a power of 2 that divides the inputs."""
    wanted = BLOCKS // (-(-rows // TILE) * -(-outputs // TILE))
    found = 1
    while found * 2 <= min(wanted, MOST_PARTS) and inputs % (found * 2) == 0 and inputs // (found * 2) >= LEAST_INPUTS:
        found *= 2
    return found


def product(x: Float[Array, "R I"], matrix: Float[Array, "I O"]) -> Float[Array, "P R O"]:
    """Returns x @ matrix in parts, float32."""
    (rows, inputs), many = x.shape, parts(*x.shape, matrix.shape[1])
    x, matrix = x.reshape(rows, many, -1), matrix.reshape(many, inputs // many, -1)
    return jnp.einsum("rpi,pio->pro", x, matrix, preferred_element_type=jnp.float32)


def _summed(ref: Any, row: Any, columns: Array, there: Any, dtype: Any) -> Array:
    """Returns a row's numbers of a product at these columns, rounded to dtype, as float32."""
    total = jnp.zeros(columns.shape, jnp.float32)
    for part in range(ref.shape[0]):
        total = total + triton.load(ref.at[part, row, columns], mask=there, other=0.0)
    return total.astype(dtype).astype(jnp.float32)


def _rounded(x: Array, dtype: Any) -> Array:
    return x.astype(dtype).astype(jnp.float32)


def normed(
    h: Float[Array, "R D"],
    made: Float[Array, "P R D"] | None,
    weight: Float[Array, " D"],
    *,
    eps: float,
    offset: float,
    interpret: bool = False,
) -> tuple[Float[Array, "R D"], Float[Array, "R D"]]:
    """Returns the stream with a product added, and its root-mean-square norm (arXiv 1910.07467 eq. 4)."""
    (rows, width), dtype = h.shape, h.dtype

    def kernel(*refs: Any) -> None:
        (h_ref, *made_ref, weight_ref), (stream_ref, out_ref) = refs[:-2], refs[-2:]
        row, at = pl.program_id(0), lax.broadcasted_iota(jnp.int32, (1 << (width - 1).bit_length(),), 0)
        there = at < width
        wide = triton.load(h_ref.at[row, at], mask=there, other=0.0).astype(jnp.float32)
        if made_ref:
            wide = _rounded(wide + _summed(made_ref[0], row, at, there, dtype), dtype)
        unit = wide * lax.rsqrt(jnp.sum(wide * wide) / width + eps)
        scale = triton.load(weight_ref.at[at], mask=there, other=0.0).astype(jnp.float32) + offset
        triton.store(stream_ref.at[row, at], wide.astype(dtype), mask=there)
        triton.store(out_ref.at[row, at], (unit * scale).astype(dtype), mask=there)

    run = pl.pallas_call(
        kernel,
        grid=(rows,),
        out_shape=(jax.ShapeDtypeStruct(h.shape, dtype),) * 2,
        input_output_aliases={0: 0},
        compiler_params=triton.CompilerParams(num_warps=8),
        interpret=interpret,
        name="add_and_norm",
    )
    return run(h, *(() if made is None else (made,)), weight)


class Projection(NamedTuple):
    """What follows a layer's product of queries, keys and values: biases [N, H], [K, H], [K, H], and norms [H], or none of either."""

    biases: tuple[Array, ...] = ()
    norms: tuple[Array, ...] = ()


def packed(
    made: Float[Array, "P R O"],
    then: Projection,
    turn: tuple[Float[Array, "R H2"], Float[Array, "R H2"]],
    pages: Float[Array, "pages page C L"],
    rows: Any,
    *,
    heads: int,
    padded: int,
    scale: float,
    eps: float,
    offset: float,
    interpret: bool = False,
) -> tuple[Float[Array, "K Q H"], Array]:
    """Returns scaled queries as attention_gpu.py takes them, [K, R * padded + TILE, H], and the pages with keys and values.

    Args:
      made: the product of queries, keys and values, N + 2K heads beside one another.
      turn: cosines and sines of all pairs of a head.
      rows: attention.Rows.
      heads: N.
      padded: rows that the queries of one key head take.
    """
    _, count, outputs = made.shape
    half, dtype, shape = turn[0].shape[-1], pages.dtype, pages.shape
    kv_heads = (outputs // (2 * half) - heads) // 2
    pages = pages.reshape(*shape[:2], 2 * kv_heads, 2 * half)
    weights, small = (*then.biases, *then.norms), (*turn, rows.slot, rows.position, rows.real, rows.table)
    how = dict(heads=heads, kv_heads=kv_heads, padded=padded, scale=scale, eps=eps, offset=offset)
    out = jax.ShapeDtypeStruct((kv_heads, count * padded + TILE, 2 * half), dtype)
    run = pl.pallas_call(
        functools.partial(_pack, len(then.biases), len(then.norms), **how),
        grid=(count, heads + 2 * kv_heads),
        out_shape=(jax.ShapeDtypeStruct(pages.shape, dtype), out),
        input_output_aliases={0: 0},
        compiler_params=triton.CompilerParams(num_warps=1),
        interpret=interpret,
        name="pack_rows",
    )
    pages, queries = run(pages, made, *small, *weights)
    return queries, pages.reshape(shape)


def _pack(
    biases: int,
    norms: int,
    _: Any,
    made: Any,
    cos: Any,
    sin: Any,
    slots: Any,
    positions: Any,
    reals: Any,
    table: Any,
    *refs: Any,
    heads: int,
    kv_heads: int,
    padded: int,
    scale: float,
    eps: float,
    offset: float,
) -> None:
    """Packs one row and head. The two halves of a head are apart, because a rotation mixes them."""
    (*weights, pages, queries), (row, head) = refs, (pl.program_id(0), pl.program_id(1))
    half, dtype = cos.shape[1], pages.dtype
    low = lax.broadcasted_iota(jnp.int32, (half,), 0)
    sides, first = (
        (head < heads, (head >= heads) & (head < heads + kv_heads), head >= heads + kv_heads),
        (0, heads, heads + kv_heads),
    )
    both = [_summed(made, row, head * 2 * half + at, True, dtype) for at in (low, low + half)]
    if biases:
        both = [x + _own(weights[:3], sides, first, head, at) for x, at in zip(both, (low, low + half), strict=True)]
        both = [_rounded(x, dtype) for x in both]
    if norms:
        unit = lax.rsqrt(sum(jnp.sum(x * x) for x in both) / (2 * half) + eps)
        scales = [[ref[at].astype(jnp.float32) + offset for ref in weights[biases:]] for at in (low, low + half)]
        both = [
            jnp.where(sides[2], x, _rounded(x * unit * jnp.where(sides[0], q, k), dtype))
            for x, (q, k) in zip(both, scales, strict=True)
        ]
    (a, b), c, s = both, cos[row, low], sin[row, low]
    turned = a * c - b * s, b * c + a * s
    both = [jnp.where(sides[2], x, _rounded(y, dtype)).astype(dtype) for x, y in zip(both, turned, strict=True)]

    @pl.when(sides[0])
    def _() -> None:
        group = heads // kv_heads
        place = lax.div(head, group), row * padded + lax.rem(head, group)
        for at, x in zip((low, low + half), both, strict=True):
            queries[*(jnp.full_like(low, one) for one in place), at] = x * jnp.asarray(scale, dtype)

    page, position = pages.shape[1], positions[row]
    number = table[slots[row], lax.div(position, page)]

    @pl.when(~sides[0] & reals[row] & (number >= 0) & (number < pages.shape[0]))
    def _() -> None:
        line = jnp.where(sides[1], 2 * (head - heads), 2 * (head - heads - kv_heads) + 1)
        place = number, lax.rem(position, page), line
        for at, x in zip((low, low + half), both, strict=True):
            pages[*(jnp.full_like(low, one) for one in place), at] = x


def _own(refs: Any, sides: Any, first: Any, head: Any, columns: Array) -> Array:
    """Returns the bias of a head, of queries, keys or values, as float32."""
    total = jnp.zeros(columns.shape, jnp.float32)
    for ref, mine, start in zip(refs, sides, first, strict=True):
        place = jnp.full_like(columns, jnp.where(mine, head - start, 0))
        total = total + triton.load(ref.at[place, columns], mask=mine, other=0.0).astype(jnp.float32)
    return total


def combined(
    out: Float[Array, "I K Q H"],
    peak: Float[Array, "I K Q S"],
    mass: Float[Array, "I K Q S"],
    position: Int[Array, " R"],
    real: Bool[Array, " R"],
    sinks: Float[Array, " N"] | None = None,
    *,
    heads: int,
    padded: int,
    stretch: int,
    window: int | None,
    dtype: Any,
    interpret: bool = False,
) -> Float[Array, "R N H"]:
    """Returns the softmax-weighted sum over the stretches that a row reaches, in rising order. Others are not read.

    peak, mass: of each stretch, in the first and in the last column.
    """
    many, kv_heads, _, width = out.shape
    group, last = heads // kv_heads, mass.shape[-1] - 1

    def kernel(out_ref: Any, peak_ref: Any, mass_ref: Any, position_ref: Any, real_ref: Any, *refs: Any) -> None:
        *sinks_ref, made_ref = refs
        row, head = pl.program_id(0), pl.program_id(1)
        kv, place = lax.div(head, group), row * padded + lax.rem(head, group)
        own, at = position_ref[row], lax.broadcasted_iota(jnp.int32, (width,), 0)
        first = jnp.int32(0) if window is None else lax.div(jnp.maximum(own - window + 1, 0), stretch)
        end = jnp.where(real_ref[row], jnp.minimum(lax.div(own, stretch) + 1, many), first)
        high = lax.fori_loop(
            first, end, lambda i, peak: jnp.maximum(peak, peak_ref[i, kv, place, 0]), jnp.float32(BIG_NEGATIVE)
        )

        def add(i: Any, sums: tuple[Array, Array]) -> tuple[Array, Array]:
            share = jnp.exp(peak_ref[i, kv, place, 0] - high)
            values = out_ref[*(jnp.full_like(at, one) for one in (i, kv, place)), at]
            return sums[0] + share * mass_ref[i, kv, place, last], sums[1] + share * values

        mass, mixed = lax.fori_loop(first, end, add, (jnp.float32(0), jnp.zeros(width, jnp.float32)))
        if sinks_ref:
            shrink, mass = joined(high, mass, sinks_ref[0][head].astype(jnp.float32))
            mixed = mixed * shrink
        mixed = mixed / jnp.where(mass > 0, mass, 1.0)
        made_ref[jnp.full_like(at, row), jnp.full_like(at, head), at] = mixed.astype(dtype)

    run = pl.pallas_call(
        kernel,
        grid=(position.shape[0], heads),
        out_shape=jax.ShapeDtypeStruct((position.shape[0], heads, width), dtype),
        compiler_params=triton.CompilerParams(num_warps=max(1, min(4, width // 128))),
        interpret=interpret,
        name="combine_stretches",
    )
    return run(out, peak, mass, position, real, *(() if sinks is None else (sinks,)))
