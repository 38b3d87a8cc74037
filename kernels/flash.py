"""Attention of packed rows by kernels: what the kernels of all GPUs share, and the gradient that they make together.

A key is seen by a query of the same segment that is not before it and not beyond the window. Segments are contiguous, so
the keys that a query sees are one stretch, first[t] .. t, and the queries that see a key are t .. last[t]. Both rise
with t. Each block therefore walks from the first block of the other side that it needs to the last.

The forward kernel keeps the log of each query's mass, and the backward ones compute scores again. A sink joins a query's mass
(gpt-oss, arXiv 2508.10925), so the backward pass reads it from that log. Its gradient is -sum of its weight times (slope . output).
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float, Int


class Stretches(NamedTuple):
    """Of packed segments: the first key that each query sees, and the last query that sees each key."""

    first: Int[Array, "B T"]
    last: Int[Array, "B T"]


def stretches(segment_ids: Int[Array, "B T"], window: int | None) -> tuple[Int[Array, "B T"], Int[Array, "B T"]]:
    """Returns the first key that each query sees, and the last query that sees each key."""
    T = segment_ids.shape[1]
    at = jnp.arange(T, dtype=jnp.int32)
    changes = segment_ids[:, 1:] != segment_ids[:, :-1]
    begins = jnp.pad(changes, ((0, 0), (1, 0)), constant_values=True)
    ends = jnp.pad(changes, ((0, 0), (0, 1)), constant_values=True)
    first = lax.cummax(jnp.where(begins, at, 0), axis=1)
    last = lax.cummin(jnp.where(ends, at, T - 1), axis=1, reverse=True)
    if window is not None:
        first, last = jnp.maximum(first, at - (window - 1)), jnp.minimum(last, at + (window - 1))
    return first, last


@dataclass(frozen=True)
class How:
    """What is fixed when the kernels are compiled.

    - saved: name of what a remat policy may keep
    - interpret: how the kernels run without a device; false where they are compiled
    """

    scale: float
    window: int | None
    soft_cap: float | None
    saved: str
    interpret: Any

    def __post_init__(self) -> None:
        if not self.scale > 0:
            raise ValueError(f"attention: scale={self.scale} must be above 0; it is 1 over the root of a head's size")

    @property
    def heat(self) -> float:
        """What a raw score is multiplied by: 2 to that power is its weight."""
        return math.log2(math.e) * (self.scale if self.soft_cap is None else self.soft_cap)

    def scores(self, product: Array) -> tuple[Array, Array | float]:
        """Returns the raw scores of products of queries and keys, and the slope of the score by the product over `scale`."""
        if self.soft_cap is None:
            return product, 1.0
        bent = jnp.tanh(product * (self.scale / self.soft_cap))
        return bent, 1 - bent * bent


class Walks(NamedTuple):
    """The kernels. mass: [B, N, T], of each query. dot: its slope times its output. Masses and sinks are binary logarithms.

    - forward: (how, q, k, v, texts, sinks) -> output, mass
    - by_queries: (how, q, k, v, texts, slope, mass, dot) -> gradient of q
    - by_keys: the same -> gradients of k and v
    """

    forward: Callable
    by_queries: Callable
    by_keys: Callable


def wide(x: Any) -> Any:
    """Returns the dtype of sums: float32, or wider where x is."""
    return jnp.promote_types(x.dtype, jnp.float32)


def powers(sinks: Float[Array, " N"] | None, q: Array) -> Float[Array, " N"] | None:
    """Returns sinks as binary logarithms."""
    return None if sinks is None else math.log2(math.e) * sinks.astype(wide(q))


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def attention(walks: Walks, how: How, q: Array, k: Array, v: Array, texts: Any, sinks: Array | None) -> Array:
    """Returns the output of the forward kernel. texts: what the kernels know of segments. sinks: as `powers` returns them."""
    return walks.forward(how, q, k, v, texts, sinks)[0]


def _kept(walks: Walks, how: How, q: Array, k: Array, v: Array, texts: Any, sinks: Array | None) -> tuple[Array, tuple]:
    # Without a barrier XLA would run a Mosaic kernel twice in a scan: once for what follows, and once into the stack that is kept.
    made = lax.optimization_barrier(walks.forward(how, q, k, v, texts, sinks))
    out, mass = (checkpoint_name(x, how.saved) for x in made)
    return out, (q, k, v, texts, sinks, out, mass)


def _gradients(walks: Walks, how: How, kept: tuple, slope: Array) -> tuple:
    q, k, v, texts, sinks, out, mass = kept
    dot = jnp.sum(slope.astype(wide(q)) * out.astype(wide(q)), axis=-1).transpose(0, 2, 1)
    dq = walks.by_queries(how, q, k, v, texts, slope, mass, dot)
    dk, dv = walks.by_keys(how, q, k, v, texts, slope, mass, dot)
    if sinks is None:
        return dq, dk, dv, None, None
    by_sinks = -math.log(2) * jnp.sum(jnp.exp2(sinks[:, None] - mass) * dot, axis=(0, 2))  # they are binary logarithms
    return dq, dk, dv, None, by_sinks


attention.defvjp(_kept, _gradients)
