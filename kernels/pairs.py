"""Sums over pairs of small vectors, in place of scans, sorts, gathers and scatters: array code over numpy or jax.numpy.

An accelerator computes such a sum in one kernel, and makes several of a scan or a sort. Kernels in Pallas-Triton have no sort, gather
or scatter of values at all (small_arrays.py).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

Array = Any


def sums(xp, measure: Callable[..., Array], own: Sequence[Array], others: Sequence[Array], dtype: Any = None) -> Array:
    """Returns [n]: for each i the sum over all j of measure(*own at i, *others at j), whole numbers or truth values.

    own: vectors of n. others: vectors of one other length. dtype: of the result; None: that of the last vector."""
    dtype = others[-1].dtype if dtype is None else dtype
    every = measure(*(x[:, None] for x in own), *(x[None, :] for x in others))
    return xp.sum(every, axis=1).astype(dtype)


def running(xp, values: Array) -> Array:
    """Returns the sum of the values up to each of them."""
    at = xp.arange(values.shape[0])
    return sums(xp, lambda mine, at, value: xp.where(at <= mine, value, 0), (at,), (at, values))


def taken(xp, values: Array, at: Array) -> Array:
    """Returns values[at]."""
    every = xp.arange(values.shape[0], dtype=at.dtype)
    return sums(xp, lambda mine, at, value: xp.where(at == mine, value, 0), (at,), (every, values))
