"""Products of rows with a matrix, and norms of rows, on TPUs, whose bits do not depend on the number of rows.

A program multiplies up to TILES tiles of TILE rows with a block of the matrix, each tile in a product of its own. It walks the
blocks of the sum in order and adds them in float32. So all numbers of rows have one shape of products and one order of the
sum. XLA:TPU picks the blocks of a sum by the number of rows.

A matrix unit takes a tile of TILE rows in about the time in which the block of the matrix arrives. So rows that only fill a tile
cost little where there are few.

Invariant: a row's result depends on that row and the weights alone.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Num

from jaxrl_post.kernels.pallas_tpu import pl, pltpu

TILE = 128  # rows of a product
TILES = 4  # of a program, at most
LANES = 128
WIDE, DEEP = 512, 1024  # outputs of a block, and numbers that are summed over in one turn, at most
NORM_ROWS = 16  # of a program of a norm: a whole tile of 2-byte numbers in the chip's memory
NEEDS = f"bfloat16, and matrices of the same dtype with sums over a multiple of {LANES}"
NORM_NEEDS = f"rows of a multiple of {LANES}"


def serves(dtype: Any, of_matrix: Any, inputs: int, outputs: int) -> bool:
    return of_matrix == dtype == jnp.bfloat16 and inputs % LANES == 0


def norms(dtype: Any, weights: int, size: int) -> bool:
    """Returns whether the kernel of norms serves rows of `size` numbers. One weight for all of them is not served."""
    return jnp.dtype(dtype) == jnp.bfloat16 and weights == size and size % LANES == 0


def depth(inputs: int) -> int:
    """Returns how many numbers are summed over in one turn: the most of DEEP that divide the sum."""
    return next(deep for deep in range(min(DEEP, inputs), 0, -LANES) if inputs % deep == 0)


def product(
    rows: Float[Array, "R K"], matrix: Num[Array, "_ _"], dtype: Any, turned: bool = False, interpret: Any = False
) -> Float[Array, "R N"]:
    """Returns rows times the matrix [K, N] in this dtype, summed in float32. turned: the matrix is [N, K].

    `interpret`: runs without a device.
    """
    inputs, outputs = matrix.shape[::-1] if turned else matrix.shape
    count, deep, wide = len(rows), depth(inputs), min(WIDE, -(-outputs // LANES) * LANES)
    tiles = min(TILES, -(-count // TILE))
    high = tiles * TILE
    rows = jnp.pad(rows, ((0, -count % high), (0, 0)))
    block = (
        pl.BlockSpec((wide, deep), lambda r, n, k: (n, k))
        if turned
        else pl.BlockSpec((deep, wide), lambda r, n, k: (k, n))
    )
    made = pl.pallas_call(
        functools.partial(_multiply, tiles, turned),
        grid=(len(rows) // high, -(-outputs // wide), inputs // deep),
        in_specs=[pl.BlockSpec((high, deep), lambda r, n, k: (r, k)), block],
        out_specs=pl.BlockSpec((high, wide), lambda r, n, k: (r, n)),
        out_shape=jax.ShapeDtypeStruct((len(rows), outputs), dtype),
        scratch_shapes=[pltpu.VMEM((high, wide), jnp.float32)],
        compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel", "parallel", "arbitrary")),
        interpret=interpret,
        name="multiply_rows",
    )(rows, matrix)
    return made[:count]


def _multiply(tiles: int, turned: bool, rows: Any, matrix: Any, made: Any, total: Any) -> None:
    """Adds a block of the sum to each tile's total, and writes the totals behind the last block."""
    turn, last = pl.program_id(2), pl.num_programs(2) - 1
    for tile in range(tiles):
        own = pl.ds(tile * TILE, TILE)
        exact = None if rows.dtype.itemsize == 2 else lax.Precision.HIGHEST
        axes = ((1,), (int(turned),)), ((), ())
        here = lax.dot_general(rows[own, :], matrix[...], axes, precision=exact, preferred_element_type=jnp.float32)
        total[own, :] = jnp.where(turn == 0, here, total[own, :] + here)

    @pl.when(turn == last)
    def _():
        made[...] = total[...].astype(made.dtype)


def norm(
    rows: Float[Array, "R D"], weight: Num[Array, " D"], eps: float, offset: float, interpret: Any = False
) -> Float[Array, "R D"]:
    """Returns the root-mean-square norm of each row (models/layer.py: norm), computed in float32.

    `interpret`: runs without a device.
    """
    size = rows.shape[-1]

    def body(rows: Any, weight: Any, made: Any) -> None:
        wide = rows[...].astype(jnp.float32)
        unit = wide * lax.rsqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + eps)
        made[...] = (unit * (weight[...].astype(jnp.float32) + offset)).astype(made.dtype)

    block = pl.BlockSpec((NORM_ROWS, size), lambda r: (r, 0))
    return pl.pallas_call(
        body,
        grid=(-(-len(rows) // NORM_ROWS),),
        in_specs=[block, pl.BlockSpec((1, size), lambda r: (0, 0))],
        out_specs=block,
        out_shape=jax.ShapeDtypeStruct(rows.shape, rows.dtype),
        compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel",)),
        interpret=interpret,
        name="norm_rows",
    )(rows, weight[None])
