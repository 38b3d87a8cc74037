"""Paged attention over rows, and the cache it reads: the jnp reference.

The cache of one layer is a pytree that only `empty`, `write`, `copy` and `attention` touch: layout and dtype live behind
them. Pages hold `page` consecutive positions of one slot; page ids never influence values.

Invariant: a row's output depends on its slot's entries at positions <= its own, walked in absolute order of pages with an
online softmax; masked entries are exact zeros, so neither what lies in a stale page nor how long other slots are changes a
bit.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

BIG_NEGATIVE = -1e30


class Cache(NamedTuple):
    """Keys and values of one layer, [pages, page, K, H]."""

    k: Array
    v: Array


class Rows(NamedTuple):
    """Where R rows are: their slot, their absolute position, whether they are real, and the page table of all slots.

    Rows of one slot are consecutive and ascending. An entry of `table` >= pages is not mapped."""

    slot: Int[Array, " R"]
    position: Int[Array, " R"]
    real: Bool[Array, " R"]
    table: Int[Array, "S blocks"]


def empty(pages: int, page: int, kv_heads: int, head_dim: int, dtype) -> Cache:
    """A zeroed cache of one layer."""
    shape = (pages, page, kv_heads, head_dim)
    return Cache(jnp.zeros(shape, dtype), jnp.zeros(shape, dtype))


def write(cache: Cache, k: Float[Array, "R K H"], v: Float[Array, "R K H"], rows: Rows) -> Cache:
    """Puts each real row's key and value at its position; rows that are not real are dropped."""
    pages, page = cache.k.shape[:2]
    where = jnp.where(rows.real, rows.table[rows.slot, rows.position // page], pages)
    offset = rows.position % page
    return Cache(cache.k.at[where, offset].set(k.astype(cache.k.dtype), mode="drop"),
                 cache.v.at[where, offset].set(v.astype(cache.v.dtype), mode="drop"))


def copy(cache: Cache, source: Int[Array, " I"], target: Int[Array, " I"]) -> Cache:
    """Copies whole pages; a target >= pages is dropped."""
    return Cache(cache.k.at[target].set(cache.k[source], mode="drop"), cache.v.at[target].set(cache.v[source], mode="drop"))


def attention(q: Float[Array, "R N H"], cache: Cache, rows: Rows, *, scale: float, window: int | None,
              soft_cap: float | None) -> Float[Array, "R N H"]:
    """Causal attention of each row over its slot's cache, grouped queries, up to the longest live length.

    `window` w keeps positions > own - w; `soft_cap` c bends scores to c*tanh(score/c). Softmax in float32."""
    R, N, H = q.shape
    pages, page, K, _ = cache.k.shape
    heads = (q * scale).reshape(R, K, N // K, H)
    live = jnp.where(rows.real, rows.position + 1, 0)
    blocks = (jnp.max(live) + page - 1) // page

    def block(b, carry):
        peak, mass, out = carry
        ids = jnp.minimum(rows.table[rows.slot, b], pages - 1)
        keys, values = cache.k[ids].astype(q.dtype), cache.v[ids].astype(q.dtype)
        scores = jnp.einsum("rkgh,rpkh->rkgp", heads, keys, preferred_element_type=jnp.float32)
        if soft_cap is not None:
            scores = soft_cap * jnp.tanh(scores / soft_cap)
        at = b * page + jnp.arange(page)
        seen = at[None, :] < live[:, None]
        if window is not None:
            seen &= at[None, :] > (rows.position - window)[:, None]
        seen = seen[:, None, None, :]
        high = jnp.maximum(peak, jnp.max(jnp.where(seen, scores, BIG_NEGATIVE), axis=-1))
        shrink = jnp.exp(peak - high)
        weight = jnp.where(seen, jnp.exp(scores - high[..., None]), 0.0)
        values = jnp.where(seen[:, 0, 0, :, None, None], values, 0)  # a stale value may be infinite, and 0 * inf is not 0
        mixed = jnp.einsum("rkgp,rpkh->rkgh", weight.astype(q.dtype), values, preferred_element_type=jnp.float32)
        return high, mass * shrink + jnp.sum(weight, axis=-1), out * shrink[..., None] + mixed

    shape = (R, K, N // K)
    start = (jnp.full(shape, BIG_NEGATIVE, jnp.float32), jnp.zeros(shape, jnp.float32),
             jnp.zeros((*shape, H), jnp.float32))
    _, mass, out = jax.lax.fori_loop(0, blocks, block, start)
    return (out / jnp.where(mass > 0, mass, 1.0)[..., None]).reshape(R, N, H).astype(q.dtype)
