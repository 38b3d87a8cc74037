"""The inverse of unit lower triangular matrices, by products of whole matrices: for XLA, and inside kernels."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

HOW = dict(precision=lax.Precision.HIGHEST)


@jax.custom_vjp
def inverse(under: Float[Array, "*some C C"]) -> Float[Array, "*some C C"]:
    """Returns the inverse of 1 + `under`, whose numbers on and above the diagonal are 0. C is a power of two.

    The inverses X and Y of two blocks on the diagonal, with B between them, make that of both together: its corner is -Y B X. So
    all of it is products of whole matrices. XLA:CPU takes many times as long for triangular systems, and XLA:TPU long to
    compile products of small blocks.
    Its gradient is two products: X' = -X A' X of an inverse X.
    """
    row, column = _places(under)
    made = jnp.broadcast_to(jnp.where(row == column, jnp.ones((), under.dtype), 0), under.shape)
    for level in range(under.shape[-1].bit_length() - 1):
        corners = ((row >> level) % 2 == 1) & ((row >> level) - 1 == column >> level)
        made = made - jnp.matmul(made, jnp.matmul(jnp.where(corners, under, 0), made, **HOW), **HOW)
    return made


def _places(x: Array) -> tuple[Array, Array]:
    """Returns the row and the column of each number of a matrix. A kernel on a TPU makes no numbers of one axis."""
    size = x.shape[-1]
    return lax.broadcasted_iota(jnp.int32, (size, size), 0), lax.broadcasted_iota(jnp.int32, (size, size), 1)


def _slope(inverse: Array, slope: Array) -> tuple[Array]:
    row, column = _places(inverse)
    turned = jnp.einsum("...ji,...jk->...ik", inverse, jnp.einsum("...jk,...lk->...jl", slope, inverse, **HOW), **HOW)
    return (jnp.where(row > column, -turned, 0),)


inverse.defvjp(lambda under: (inverse(under),) * 2, _slope)
