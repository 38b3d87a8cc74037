"""Products of rows with a matrix, and norms of rows, on NVIDIA GPUs, whose bits do not depend on the number of rows. In Pallas-Triton.

A program of a product makes WIDE outputs of up to TILES tiles of TILE rows. In each turn it reads one block of the matrix and
multiplies every tile with it, by an instruction of its own. So all numbers of rows have one instruction shape and one order of
the sum. Where few blocks of outputs would leave most of a device idle, the sum is cut into parts. How many there are follows
from the matrix alone, and their sums are added in order.

A program of a norm computes one row.

The floor of a product is the bytes of its matrix. At 16 rows a step of Qwen2.5-1.5B reads 3.09 GB of weights, which take 1.05
ms on an H100. With XLA's products the step takes 2.8 ms there.

Invariant: a row's result depends on that row and the weights alone. Rows that only fill a tile are read as zeros and never written.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Num

from jaxrl_post.kernels.pallas_triton import pl, triton

TILE = 64  # rows of an instruction: those of wgmma
TILES = 4  # of a program, at most
WIDE, DEEP = 64, 64  # outputs of a block, and numbers that are summed over in one turn, at most
LEAST = 16  # of each
BLOCKS, SHORTEST = 132, 256  # programs that keep a device busy, and numbers of a part that are worth a program
WARPS, NORM_WARPS, WIDEST_NORM = 4, 4, 1 << 14
RING = 96 << 10  # bytes that a program loads ahead into shared memory, so that two of them fit on a multiprocessor
NEEDS = f"bfloat16 or float16, and matrices of the same dtype whose sides are multiples of {LEAST}"


def serves(dtype: Any, of_matrix: Any, inputs: int, outputs: int) -> bool:
    return of_matrix == dtype and jnp.dtype(dtype).itemsize == 2 and inputs % LEAST == outputs % LEAST == 0


def norms(dtype: Any, weights: int, size: int) -> bool:
    """Returns whether the kernel of norms serves rows of `size` numbers. One weight for all of them is not served."""
    return jnp.dtype(dtype).itemsize == 2 and weights == size <= WIDEST_NORM


def width(numbers: int, most: int) -> int:
    """Returns the largest size of a block, a power of 2 up to `most`, that divides an axis."""
    return next(size for size in (64, 32, 16) if size <= most and numbers % size == 0)


def parts(inputs: int, outputs: int) -> int:
    """Returns into how many parts the sum over `inputs` is cut: the fewest that give BLOCKS programs, or else the most."""
    turns, blocks = inputs // width(inputs, DEEP), outputs // width(outputs, WIDE)
    fitting = [part for part in range(1, turns + 1) if turns % part == 0 and (part == 1 or inputs // part >= SHORTEST)]
    return next((part for part in fitting if part * blocks >= BLOCKS), fitting[-1])


def product(
    rows: Float[Array, "R K"], matrix: Num[Array, "_ _"], dtype: Any, turned: bool = False, interpret: bool = False
) -> Float[Array, "R N"]:
    """Returns rows times the matrix [K, N] in this dtype, summed in float32. turned: the matrix is [N, K].

    `interpret`: runs without a device.
    """
    inputs, outputs = matrix.shape[::-1] if turned else matrix.shape
    count, tiles = parts(inputs, outputs), min(TILES, -(-len(rows) // TILE))
    wide, deep = width(outputs, WIDE), width(inputs, DEEP)
    stages = max(2, RING // ((tiles * TILE + wide) * deep * 2))  # no bits depend on how far ahead a program loads
    made = jax.ShapeDtypeStruct((count, len(rows), outputs), jnp.float32 if count > 1 else dtype)
    found = pl.pallas_call(
        functools.partial(_multiply, tiles, wide, deep, inputs // count, turned),
        grid=(-(-len(rows) // (TILE * tiles)), outputs // wide, count),
        out_shape=made,
        compiler_params=triton.CompilerParams(num_warps=WARPS, num_stages=stages),
        interpret=interpret,
        name="multiply_rows",
    )(rows, matrix)
    return functools.reduce(jnp.add, found).astype(dtype)


def _multiply(tiles: int, wide: int, deep: int, summed: int, turned: bool, rows: Any, matrix: Any, made: Any) -> None:
    """Multiplies a group of tiles with a block of outputs, over one part of the sum."""
    group, block, part = (pl.program_id(axis) for axis in range(3))
    first, out = group * (tiles * TILE), pl.ds(block * wide, wide)
    own = [first + tile * TILE + jnp.arange(TILE, dtype=jnp.int32) < rows.shape[0] for tile in range(tiles)]
    some = [pl.ds(first + tile * TILE, TILE) for tile in range(tiles)]

    def turn(number: Any, totals: tuple) -> tuple:
        inner = pl.ds(part * summed + number * deep, deep)
        weights = matrix[out, inner].T if turned else matrix[inner, out]
        given = [triton.load(rows.at[at, inner], mask=there[:, None], other=0.0) for at, there in zip(some, own)]
        return tuple(total + _dot(one, weights) for total, one in zip(totals, given))

    start = tuple(jnp.zeros((TILE, wide), jnp.float32) for _ in range(tiles))
    totals = lax.fori_loop(0, summed // deep, turn, start)
    for at, there, total in zip(some, own, totals):
        triton.store(made.at[part, at, out], total.astype(made.dtype), mask=there[:, None])


def _dot(a: Array, b: Array) -> Array:
    """Multiplies two blocks; float32 in full."""
    exact = None if a.dtype.itemsize == 2 else lax.Precision.HIGHEST
    return jnp.dot(a, b, preferred_element_type=jnp.float32, precision=exact)


def norm(
    rows: Float[Array, "R D"], weight: Num[Array, " D"], eps: float, offset: float, interpret: bool = False
) -> Float[Array, "R D"]:
    """Returns the root-mean-square norm of each row (models/layer.py: norm), computed in float32.

    `interpret`: runs without a device.
    """
    size = rows.shape[-1]
    whole = max(1 << (size - 1).bit_length(), LEAST)

    def body(rows: Any, weight: Any, made: Any) -> None:
        row, at = pl.program_id(0), pl.ds(0, whole)
        there = jnp.arange(whole, dtype=jnp.int32) < size
        wide = triton.load(rows.at[row, at], mask=there, other=0.0).astype(jnp.float32)
        factor = triton.load(weight.at[at], mask=there, other=0.0).astype(jnp.float32) + offset
        unit = wide * lax.rsqrt(jnp.sum(wide * wide) / size + eps)
        triton.store(made.at[row, at], (unit * factor).astype(made.dtype), mask=there)

    return pl.pallas_call(
        body,
        grid=(len(rows),),
        out_shape=jax.ShapeDtypeStruct(rows.shape, rows.dtype),
        compiler_params=triton.CompilerParams(num_warps=NORM_WARPS),
        interpret=interpret,
        name="norm_rows",
    )(rows, weight)
