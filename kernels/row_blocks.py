"""Products of rows with a matrix, norms of rows, and functions of rows, such that no bit depends on the number of rows.

A compiler picks the tiles of a product, the parts of its sum, and the order of a norm's sum by the number of rows. Here each
is fixed:

- On TPUs and NVIDIA GPUs kernels compute products and norms in the shapes that they serve (product_tpu.py, product_gpu.py).
- Elsewhere rows are computed in blocks of BLOCK rows, one block after another, by one program.

Invariant: a row's result depends on that row and the weights alone. The two forms round differently.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Num

from jaxrl_post.kernels import product_gpu, product_tpu

KERNELS = {"cuda": product_gpu, "tpu": product_tpu}  # by platform
BLOCK = 16  # rows of a block, where no kernel serves


def product(
    rows: Float[Array, "*R K"], matrix: Num[Array, "_ _"], dtype: Any, platforms: frozenset[str], turned: bool = False
) -> Float[Array, "*R N"]:
    """Returns rows times the matrix [K, N] in this dtype. turned: the matrix is [N, K].

    The sum has the dtype of the rows or float32, whichever is wider. platforms: those whose kernel may be used.
    """
    wide, sides = jnp.promote_types(rows.dtype, jnp.float32), matrix.shape[::-1] if turned else matrix.shape

    def multiply(block: Array, matrix: Array) -> Array:
        summed = ((1,), (int(turned),)), ((), ())
        return jax.lax.dot_general(block, matrix.astype(block.dtype), summed, preferred_element_type=wide).astype(dtype)

    kernels = {
        platform: _folded(functools.partial(kernel.product, dtype=dtype, turned=turned))
        for platform, kernel in KERNELS.items()
        if platform in platforms and kernel.serves(rows.dtype, matrix.dtype, *sides)
    }
    made = _placed(kernels, multiply, rows.reshape(-1, rows.shape[-1]), matrix)
    return made.reshape(*rows.shape[:-1], sides[1])


def norm(
    plain: Callable[[Array, Array], Array],
    rows: Float[Array, "*R D"],
    weight: Num[Array, " D"],
    eps: float,
    offset: float,
    platforms: frozenset[str],
) -> Float[Array, "*R D"]:
    """Returns the root-mean-square norm of each row, as `plain(rows, weight)` computes it where no kernel does."""
    kernels = {
        platform: _folded(functools.partial(kernel.norm, eps=eps, offset=offset))
        for platform, kernel in KERNELS.items()
        if platform in platforms and kernel.norms(rows.dtype, weight.shape[-1], rows.shape[-1])
    }
    return _placed(kernels, plain, rows.reshape(-1, rows.shape[-1]), weight).reshape(rows.shape)


def _placed(kernels: Mapping[str, Callable], run: Callable, rows: Array, weights: Array) -> Array:
    """Returns what a platform's kernel computes, and elsewhere `run(rows, weights)` in blocks of rows."""

    def default(rows: Array, weights: Array) -> Array:
        return in_blocks(lambda block: run(block, weights), rows)

    return jax.lax.platform_dependent(rows, weights, default=default, **kernels)


def of_rows(run: Callable, *rows: Array, platforms: frozenset[str]) -> Any:
    """Returns `run(*rows)`, whose kernels compute each row alone on the platforms that have them, and else in blocks."""
    kernels = {platform: run for platform in KERNELS if platform in platforms}
    return jax.lax.platform_dependent(*rows, default=functools.partial(in_blocks, run), **kernels)


def in_blocks(run: Callable, *rows: Array) -> Any:
    """Returns `run(*rows)`, computed BLOCK rows at a time. Rows are the first axis of all that goes in and comes out.

    The barrier before the number of turns, and a block behind the last one that no turn computes, keep a compiler from
    dissolving a loop of one turn. The barriers around a block keep it from merging the block with what makes or takes it.
    """
    count, turns = len(rows[0]), -(-len(rows[0]) // BLOCK)
    more = (turns + 1) * BLOCK - count
    blocks = [jnp.pad(x, ((0, more), *((0, 0),) * (x.ndim - 1))) for x in rows]
    blocks = [x.reshape(turns + 1, BLOCK, *x.shape[1:]) for x in blocks]

    def alone(at: Any) -> Any:
        block = [jax.lax.dynamic_index_in_dim(x, at, keepdims=False) for x in blocks]
        return jax.lax.optimization_barrier(run(*jax.lax.optimization_barrier(block)))

    def turn(at: Any, made: Any) -> Any:
        return jax.tree.map(lambda all, one: jax.lax.dynamic_update_index_in_dim(all, one, at, 0), made, alone(at))

    start = jax.tree.map(lambda x: jnp.zeros((turns, *x.shape), x.dtype), jax.eval_shape(alone, 0))
    made = jax.lax.fori_loop(0, jax.lax.optimization_barrier(jnp.int32(turns)), turn, start)
    return jax.tree.map(lambda x: x.reshape(turns * BLOCK, *x.shape[2:])[:count], made)


def _folded(run: Callable[[Array, Array], Array]) -> Callable[[Array, Array], Array]:
    """Returns `run(rows, weights)`, which under vmap is one call with all rows, because rows are independent."""
    alone = jax.custom_batching.custom_vmap(lambda rows, weights: run(rows, weights))

    @alone.def_vmap
    def mapped(size: int, batched: Any, rows: Array, weights: Array) -> tuple[Array, bool]:
        assert list(batched) == [True, False], "rows are mapped, and weights are those of all"
        made = run(rows.reshape(-1, rows.shape[-1]), weights)
        return made.reshape(size, -1, made.shape[-1]), True

    return alone
