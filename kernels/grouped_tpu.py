"""Grouped products on TPU, in Pallas.

Rows lie in tiles of TILE. A visit multiplies one tile with one group's matrix, and keeps the rows of that group. Visits of a
group lie one after another, and a block of the matrix has all of the axis that is summed over. So each block of a matrix is
read once, however many tiles the group reaches into, and no block of a group without rows is read. Source of the walk:
megablox (arXiv 2211.15841, and jax's pallas/ops/tpu/megablox), which also splits the sum.

The gradient of the matrices sums the tiles of a group in order, in float32.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int, Shaped

from jaxrl_post.kernels import eight_bits
from jaxrl_post.kernels.group_visits import listed
from jaxrl_post.kernels.pallas_tpu import in_hbm, pl, pltpu

TILE = 128  # rows
LANES = 128
BLOCK_BYTES = 4 << 20  # of a block of a matrix
SUM_BYTES = 3 << 20  # of a block of a matrix's gradient, in float32
MEMORY = 40 << 20  # of the chip, that a kernel may use
LONGEST = 16384  # numbers of a row
NEEDS = f"bfloat16 or float16, matrices of the same dtype or of 8 bits, and rows of at most {LONGEST} numbers"


class Visits(NamedTuple):
    """What each visit works on, [visits], and where each group begins and ends, [E]. Scalars of the kernels."""

    group: Int[Array, " visits"]
    tile: Int[Array, " visits"]
    begin: Int[Array, " E"]
    end: Int[Array, " E"]


def serves(dtype: Any, of_matrices: Any, inputs: int, outputs: int) -> bool:
    return (
        of_matrices in (dtype, *eight_bits.DTYPES)
        and jnp.dtype(dtype).itemsize == 2
        and max(inputs, outputs) <= LONGEST
    )


def visits(sizes: Int[Array, " E"], rows: int, least: int = 0) -> tuple[Visits, Int[Array, ""]]:
    """Returns the walk over `rows` rows, and the number of its visits, which is at least 1.

    Args:
      least: visits of a group without rows.
    """
    tiles, end = rows // TILE, jnp.cumsum(sizes)
    begin = end - sizes
    first = jnp.minimum(begin // TILE, tiles - 1)
    counts = jnp.where(sizes > 0, (end - 1) // TILE - first + 1, least)
    group, number = listed(counts, tiles + len(sizes) - 1)
    tile = jnp.clip(first[group] + number, 0, tiles - 1)
    return Visits(group, tile, begin, end), jnp.maximum(jnp.sum(counts, dtype=jnp.int32), 1)


# ---- index maps: number of a block -> which block of an array it works on


def rows_at(block: Any, visit: Any, group: Any, tile: Any, *_: Any) -> tuple:
    return tile[visit], 0


def matrix_at(block: Any, visit: Any, group: Any, tile: Any, *_: Any) -> tuple:
    return group[visit], 0, block


def turned_matrix_at(block: Any, visit: Any, group: Any, tile: Any, *_: Any) -> tuple:
    return group[visit], block, 0


def made_at(block: Any, visit: Any, group: Any, tile: Any, *_: Any) -> tuple:
    return tile[visit], block


def width(summed: int, outputs: int, bytes_of_one: int, most: int = BLOCK_BYTES) -> int:
    """Returns the outputs of a block: at least two blocks where lanes allow, because some chips have two cores."""
    blocks = max(2, -(-summed * outputs * bytes_of_one // most))
    return outputs if outputs <= LANES else -(-outputs // blocks // LANES) * LANES or LANES


def matrix_blocks(axis: int, inputs: int, outputs: int, bytes_of_one: int) -> tuple[int, tuple, Callable]:
    """Returns the outputs of a block of matrices that are summed over `axis`, the block's shape, and its index map."""
    wide = width(inputs, outputs, bytes_of_one)
    return (wide, (None, inputs, wide), matrix_at) if axis == 1 else (wide, (None, wide, inputs), turned_matrix_at)


def turned(inputs: int, outputs: int) -> bool:
    """Returns whether XLA:TPU keeps matrices of this shape transposed, because fewer lanes are empty then. Another order is a copy."""
    empty_lanes = -outputs % LANES * inputs, -inputs % LANES * outputs
    return empty_lanes[0] > empty_lanes[1]


def _padded(rows: Array) -> Array:
    return jnp.pad(rows, ((0, -len(rows) % TILE), (0, 0)))


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
    if turned(*matrices.shape[1:]):
        axis, matrices = 3 - axis, matrices.swapaxes(1, 2)
    count, rows = len(rows), _padded(rows)
    inputs, outputs = matrices.shape[axis], matrices.shape[3 - axis]
    wide, block, where = matrix_blocks(axis, inputs, outputs, matrices.dtype.itemsize)
    walk, most = visits(sizes, len(rows))
    grid = pltpu.PrefetchScalarGridSpec(
        num_scalar_prefetch=len(walk),
        grid=(-(-outputs // wide), most),
        in_specs=[pl.BlockSpec((TILE, inputs), rows_at), pl.BlockSpec(block, where)],
        out_specs=pl.BlockSpec((TILE, wide), made_at),
    )
    made = pl.pallas_call(
        functools.partial(_product_kernel, axis - 1),
        out_shape=jax.ShapeDtypeStruct((len(rows), outputs), rows.dtype),
        grid_spec=grid,
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel", "arbitrary"), vmem_limit_bytes=None if interpret else MEMORY
        ),
        interpret=interpret,
        name=f"grouped_product_{axis}",
    )(*walk, rows, in_hbm(matrices))
    return made[:count]


def _mine(walk: Visits, visit: Any, wide: int) -> Array:
    """Returns which rows of a visit's tile are of its group, as [TILE, wide]."""
    group, at = walk.group[visit], lax.broadcasted_iota(jnp.int32, (TILE, wide), 0) + walk.tile[visit] * TILE
    return (at >= walk.begin[group]) & (at < walk.end[group])


def _dot(a: Array, b: Array, axes: tuple[int, int]) -> Array:
    """Multiplies two blocks; float32 and wider in full."""
    exact = None if a.dtype.itemsize == 2 else lax.Precision.HIGHEST
    sums = jnp.promote_types(a.dtype, jnp.float32)
    return lax.dot_general(a, b, (((axes[0],), (axes[1],)), ((), ())), preferred_element_type=sums, precision=exact)


def _product_kernel(axis: int, *refs: Any) -> None:
    walk, (rows, matrix, made) = Visits(*refs[:4]), refs[4:]
    out = _dot(rows[...], matrix[...].astype(rows.dtype), (1, axis)).astype(made.dtype)
    # Rows of groups that were here before stay. What the first visit finds is not defined, and neither is what it leaves.
    made[...] = jnp.where(_mine(walk, pl.program_id(1), out.shape[1]), out, made[...])


def by_matrices(
    rows: Float[Array, "M K"], slope: Float[Array, "M N"], sizes: Int[Array, " E"], dtype: Any, interpret: bool = False
) -> Float[Array, "E K N"]:
    """Returns of each group the sum over its rows of row times slope. It visits every group, to write its sum."""
    if turned(rows.shape[1], slope.shape[1]):
        return by_matrices(slope, rows, sizes, dtype, interpret).swapaxes(1, 2)
    rows, slope = _padded(rows), _padded(slope)
    inputs, outputs, (walk, most) = rows.shape[1], slope.shape[1], visits(sizes, len(rows), least=1)
    high = inputs if inputs <= LANES else -(-min(inputs, 1024) // LANES) * LANES
    wide = width(high, outputs, 4, SUM_BYTES)
    grid = pltpu.PrefetchScalarGridSpec(
        num_scalar_prefetch=len(walk),
        grid=(-(-outputs // wide), -(-inputs // high), most),
        in_specs=[
            pl.BlockSpec((TILE, high), lambda n, k, visit, group, tile, *_: (tile[visit], k)),
            pl.BlockSpec((TILE, wide), lambda n, k, visit, group, tile, *_: (tile[visit], n)),
        ],
        out_specs=pl.BlockSpec((None, high, wide), lambda n, k, visit, group, *_: (group[visit], k, n)),
        scratch_shapes=[pltpu.VMEM((high, wide), jnp.promote_types(rows.dtype, jnp.float32))],
    )
    return pl.pallas_call(
        _sum_kernel,
        out_shape=jax.ShapeDtypeStruct((len(sizes), inputs, outputs), dtype),
        grid_spec=grid,
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel", "parallel", "arbitrary"), vmem_limit_bytes=None if interpret else MEMORY
        ),
        interpret=interpret,
        name="grouped_sum",
    )(*walk, rows, slope)


def _sum_kernel(*refs: Any) -> None:
    walk, (rows, slope, made, total) = Visits(*refs[:4]), refs[4:]
    visit, last = pl.program_id(2), pl.num_programs(2) - 1
    group = walk.group[visit]
    begins = (visit == 0) | (walk.group[jnp.maximum(visit - 1, 0)] != group)
    ends = (visit == last) | (walk.group[jnp.minimum(visit + 1, last)] != group)
    # Rows of others count nothing, and neither does what stands in their slopes.
    a, b = (jnp.where(_mine(walk, visit, x.shape[1]), x[...], jnp.zeros_like(x[...])) for x in (rows, slope))
    here = _dot(a, b, (0, 0))
    total[...] = jnp.where(begins, here, total[...] + here)

    @pl.when(ends)
    def _():
        made[...] = total[...].astype(made.dtype)
