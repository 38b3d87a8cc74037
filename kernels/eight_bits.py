"""Numbers of 8 bits: codes, and a scale by which a group of codes is multiplied.

A matrix has a scale for each of its outputs. So a product is (x codes) * scale, and no matrix of more bits is needed beside the
codes. A key or a value of the KV cache has one scale (attention.py). Codes of both formats are exact in bfloat16.

Invariant: codes and scale depend on the numbers of their group alone. They are computed in float32 or wider.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array


class Format(NamedTuple):
    """A kind of code: its dtype and its largest number."""

    dtype: Any
    largest: float


FORMATS = {"int8": Format(jnp.dtype(jnp.int8), 127.0), "fp8": Format(jnp.dtype(jnp.float8_e4m3fn), 448.0)}
DTYPES = tuple(one.dtype for one in FORMATS.values())
AUTO = "auto"  # of an option: numbers have the dtype that they would have anyway


def format_of(dtype: Any) -> str:
    """Returns the name of the format whose codes have this dtype."""
    return next(name for name, one in FORMATS.items() if one.dtype == dtype)


def codes(x: Array, axes: int | tuple[int, ...], name: str) -> tuple[Array, Array]:
    """Returns the codes of x, and the scales without these axes, over which a group extends.

    The largest number of a group gets the largest code. A group of zeros has scale 1."""
    code, scale = _rounded(x, axes, name)
    return code.astype(FORMATS[name].dtype), jnp.squeeze(scale, axes)


@functools.partial(jax.custom_vjp, nondiff_argnums=(1, 2))
def rounded(weight: Array, axes: tuple[int, ...], name: str) -> tuple[Array, Array]:
    """Returns what `codes` does, with codes in the dtype of the weight.

    The gradient passes the rounding as if it were not there, with scales that are constants (straight-through, arXiv
    1308.3432): (x codes) * scale has the gradient of x weight."""
    code, scale = _rounded(weight, axes, name)
    return code.astype(weight.dtype), jnp.squeeze(scale, axes)


def _rounded(x: Array, axes: int | tuple[int, ...], name: str) -> tuple[Array, Array]:
    """Returns codes, still wide, and scales with the axes of a group."""
    form, own = FORMATS[name], jnp.finfo(x.dtype)
    wide = x.astype(jnp.promote_types(x.dtype, jnp.float32))
    # A compiler may leave out a cast to fewer bits and back. Then codes would depend on the program that makes them.
    wide = jax.lax.reduce_precision(wide, own.nexp, own.nmant)
    largest = jnp.max(jnp.abs(wide), axis=axes, keepdims=True)
    scale = jnp.where(largest > 0, largest / form.largest, 1).astype(wide.dtype)
    code = jnp.clip(wide / scale, -form.largest, form.largest)
    if jnp.issubdtype(form.dtype, jnp.integer):
        return jnp.round(code), scale
    return jax.lax.optimization_barrier(code.astype(form.dtype)).astype(wide.dtype), scale


def _rounded_forward(weight: Array, axes: tuple[int, ...], name: str) -> tuple:
    code, scale = rounded(weight, axes, name)
    return (code, scale), (jnp.expand_dims(scale, axes), weight[:0])


def _rounded_backward(axes: tuple[int, ...], name: str, kept: tuple, slopes: tuple) -> tuple[Array]:
    scale, empty = kept
    return ((slopes[0] / scale).astype(empty.dtype),)


rounded.defvjp(_rounded_forward, _rounded_backward)
