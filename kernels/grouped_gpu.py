"""Grouped products on NVIDIA GPUs, in Pallas-Triton.

A visit multiplies up to ROWS rows of one group, from the group's first row on, with a block of its matrix. So a group of at
most ROWS rows reads its matrix once, and a group without rows does not read it. There are as many programs as visits could be
needed. Those behind the last visit find no rows, and end.

The gradient of the matrices sums the rows of a group in order, in float32. Nothing is added by atomics.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int, Shaped

from jaxrl_post.kernels import eight_bits
from jaxrl_post.kernels.group_visits import listed
from jaxrl_post.kernels.pallas_triton import pl, triton

ROWS = 64  # of a visit
WIDEST, SUMMED = 128, 64  # outputs of a block, and numbers that are summed over in one turn, at most
LEAST = 16  # of each, which tensor cores multiply
WARPS, STAGES = 4, 3
NARROW = 128  # numbers of an axis that zeros may fill up to a multiple of LEAST: those of low-rank additions
NEEDS = f"bfloat16 or float16, matrices of the same dtype or of 8 bits, whose sides are multiples of {LEAST} or below {NARROW}"


class Visits(NamedTuple):
    """Of each visit: its group, its first row, and the row behind its group's last. No row is left where first >= end."""

    group: Int[Array, " visits"]
    first: Int[Array, " visits"]
    end: Int[Array, " visits"]


def serves(dtype: Any, of_matrices: Any, inputs: int, outputs: int) -> bool:
    fits = all(side % LEAST == 0 or side < NARROW for side in (inputs, outputs))
    return of_matrices in (dtype, *eight_bits.DTYPES) and jnp.dtype(dtype).itemsize == 2 and fits


def visits(sizes: Int[Array, " E"], rows: int) -> Visits:
    """Returns the walk over `rows` rows."""
    end = jnp.cumsum(sizes)
    group, number = listed(-(-sizes // ROWS), rows // ROWS + len(sizes))
    return Visits(group, (end - sizes)[group] + number * ROWS, end[group])


def matrix_at(block: Any, visit: Any, walk: Visits) -> tuple:
    """Returns the group and the block of outputs that a program reads of the matrices. Only one with rows reads."""
    return walk.group[visit], block


def width(numbers: int, most: int) -> int:
    """Returns the largest size of a block, a power of 2, that divides an axis."""
    return next(size for size in (128, 64, 32, 16) if size <= most and numbers % size == 0)


def _padded(rows: Array) -> Array:
    return jnp.pad(rows, ((0, max(0, ROWS - len(rows))), (0, -rows.shape[1] % LEAST)))


def _call(kernel: Any, grid: tuple, given: tuple, made: Any, name: str, interpret: bool) -> Array:
    return pl.pallas_call(
        kernel,
        grid=grid,
        out_shape=made,
        compiler_params=triton.CompilerParams(num_warps=WARPS, num_stages=STAGES),
        interpret=interpret,
        name=name,
    )(*given)


def product(
    rows: Float[Array, "M _"],
    matrices: Shaped[Array, "E K N"],
    sizes: Int[Array, " E"],
    axis: int = 1,
    interpret: bool = False,
) -> Float[Array, "M _"]:
    """Returns grouped.product. It sums over `axis` of the matrices: 1, or 2 for slopes [M, N].

    `interpret`: runs without a device, in any dtype.
    """
    count, asked, rows = len(rows), matrices.shape[3 - axis], _padded(rows)
    matrices = jnp.pad(matrices, [(0, 0), *((0, -side % LEAST) for side in matrices.shape[1:])])
    inputs, outputs = matrices.shape[axis], matrices.shape[3 - axis]
    wide, deep, walk = width(outputs, WIDEST), width(inputs, SUMMED), visits(sizes, len(rows))
    made = jax.ShapeDtypeStruct((len(rows), outputs), rows.dtype)
    kernel = functools.partial(_product_kernel, wide, deep, axis)
    grid = (outputs // wide, len(walk.group))
    return _call(kernel, grid, (*walk, rows, matrices), made, f"grouped_product_{axis}", interpret)[:count, :asked]


def _dot(a: Array, b: Array) -> Array:
    """Multiplies two blocks; float32 and wider in full."""
    exact = None if a.dtype.itemsize == 2 else lax.Precision.HIGHEST
    return jnp.dot(a, b, preferred_element_type=jnp.promote_types(a.dtype, jnp.float32), precision=exact)


def _rows_from(first: Any, end: Any, rows: int) -> tuple[Any, Array]:
    """Returns ROWS rows that are there, and which of them lie from `first` to below `end`."""
    base = jnp.minimum(first, rows - ROWS)
    at = base + jnp.arange(ROWS, dtype=jnp.int32)
    return pl.ds(base, ROWS), (at >= first) & (at < end)


def _product_kernel(wide: int, deep: int, axis: int, *refs: Any) -> None:
    walk, (rows, matrices, made) = Visits(*refs[:3]), refs[3:]
    block, visit = pl.program_id(0), pl.program_id(1)

    @pl.when(walk.first[visit] < walk.end[visit])
    def _():
        some, mine = _rows_from(walk.first[visit], walk.end[visit], rows.shape[0])
        group, block_of = matrix_at(block, visit, walk)
        out = pl.ds(block_of * wide, wide)

        def turn(number: Any, total: Array) -> Array:
            part = pl.ds(number * deep, deep)
            matrix = matrices[group, part, out] if axis == 1 else matrices[group, out, part].T
            return total + _dot(rows[some, part], matrix.astype(rows.dtype))

        start = jnp.zeros((ROWS, wide), jnp.promote_types(rows.dtype, jnp.float32))
        total = lax.fori_loop(0, rows.shape[1] // deep, turn, start)
        triton.store(made.at[some, out], total.astype(made.dtype), mask=mine[:, None])


def by_matrices(
    rows: Float[Array, "M K"], slope: Float[Array, "M N"], sizes: Int[Array, " E"], dtype: Any, interpret: bool = False
) -> Float[Array, "E K N"]:
    """Returns of each group the sum over its rows of row times slope."""
    sides, end = (rows.shape[1], slope.shape[1]), jnp.cumsum(sizes)
    rows, slope = _padded(rows), _padded(slope)
    E, inputs, outputs = len(sizes), rows.shape[1], slope.shape[1]
    high, wide = width(inputs, SUMMED), width(outputs, WIDEST)
    made = jax.ShapeDtypeStruct((E, inputs, outputs), dtype)
    kernel, grid = functools.partial(_sum_kernel, high, wide), (outputs // wide, inputs // high, E)
    return _call(kernel, grid, (end - sizes, end, rows, slope), made, "grouped_sum", interpret)[
        :, : sides[0], : sides[1]
    ]


def _sum_kernel(high: int, wide: int, begin: Any, end: Any, rows: Any, slope: Any, made: Any) -> None:
    n, k, group = (pl.program_id(axis) for axis in range(3))
    first, last = begin[group], end[group]
    inputs, outputs = pl.ds(k * high, high), pl.ds(n * wide, wide)

    def turn(number: Any, total: Array) -> Array:
        some, mine = _rows_from(first + number * ROWS, last, rows.shape[0])
        a, b = (jnp.where(mine[:, None], x, jnp.zeros_like(x)) for x in (rows[some, inputs], slope[some, outputs]))
        return total + _dot(a.T, b)

    turns = lax.div(last - first + ROWS - 1, jnp.asarray(ROWS, last.dtype))
    total = lax.fori_loop(0, turns, turn, jnp.zeros((high, wide), jnp.promote_types(rows.dtype, jnp.float32)))
    made[group, inputs, outputs] = total.astype(made.dtype)
