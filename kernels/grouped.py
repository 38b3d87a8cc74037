"""Products of rows that are sorted by group with one matrix of each group: the experts' products, forward and backward.

On TPU and on NVIDIA GPUs a kernel (grouped_tpu.py, grouped_gpu.py) computes the shapes that its `serves` accepts. It reads
the matrices of groups that have rows, and no others. `jax.lax.ragged_dot` computes all other shapes, and everything on a
CPU. XLA:GPU multiplies every row with every matrix there. XLA:TPU has a kernel of its own, whose blocks depend on the
number of rows, and it copies all matrices for the gradient of the rows.

Invariant: a row's product depends on that row and its group's matrix alone. Blocks have fixed sizes, and each sum over a
row's numbers runs in one order.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
from jaxtyping import Array, Float, Int, Shaped

from jaxrl_post.kernels import grouped_gpu, grouped_tpu, hardware

KERNELS = {"cuda": grouped_gpu, "tpu": grouped_tpu}  # by platform


def product(
    rows: Float[Array, "M K"],
    matrices: Shaped[Array, "E K N"],
    sizes: Int[Array, " E"],
    platforms: frozenset[str] = hardware.PLATFORMS,
) -> Float[Array, "M N"]:
    """Returns each row times its group's matrix: the first sizes[0] rows are of group 0, and so on.

    Matrices may have fewer bits than the rows, such as codes of 8 bits. Kernels widen each block as they read it.
    What it makes of rows behind all groups, and of their slopes, is not defined. `platforms`: those whose kernel may be used.
    """
    serving = frozenset(
        platform
        for platform, kernel in KERNELS.items()
        if platform in platforms and kernel.serves(rows.dtype, matrices.dtype, *matrices.shape[1:])
    )
    return _product(serving, rows, matrices, sizes) if serving else _plain(rows, matrices, sizes)


def _plain(rows: Array, matrices: Array, sizes: Array) -> Array:
    return jax.lax.ragged_dot(rows, matrices.astype(rows.dtype), sizes)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _product(serving: frozenset[str], rows: Array, matrices: Array, sizes: Array) -> Array:
    kernels = {platform: KERNELS[platform].product for platform in serving}
    return jax.lax.platform_dependent(rows, matrices, sizes, default=_plain, **kernels)


def gradients(
    kernel: Any,
    rows: Float[Array, "M K"],
    matrices: Shaped[Array, "E K N"],
    sizes: Int[Array, " E"],
    slope: Float[Array, "M N"],
    interpret: bool = False,
) -> tuple[Float[Array, "M K"], Float[Array, "E K N"]]:
    """Returns the gradients of `product` by rows and matrices, as one of KERNELS computes them."""
    by_rows = kernel.product(slope, matrices, sizes, axis=2, interpret=interpret)
    return by_rows, kernel.by_matrices(rows, slope, sizes, matrices.dtype, interpret)


def _kept(serving: frozenset[str], rows: Array, matrices: Array, sizes: Array) -> tuple[Array, tuple]:
    return _product(serving, rows, matrices, sizes), (rows, matrices, sizes)


def _gradients(serving: frozenset[str], kept: tuple, slope: Array) -> tuple:
    kernels = {platform: functools.partial(gradients, KERNELS[platform]) for platform in serving}
    return *jax.lax.platform_dependent(*kept, slope, default=_plain_gradients, **kernels), None


_product.defvjp(_kept, _gradients)


def _plain_gradients(rows: Array, matrices: Array, sizes: Array, slope: Array) -> Any:
    return jax.vjp(lambda *given: jax.lax.ragged_dot(*given, sizes), rows, matrices)[1](slope)
