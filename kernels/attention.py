"""Paged attention over rows, and the KV cache that it reads: the jnp reference, and the choice of a kernel.

The cache of one layer is a pytree. Only `empty`, `write`, `copy` and `attention` touch it, so layout and dtype are
private to them. A page holds `page` consecutive positions of one slot. Page ids never influence values. Keys and values
alternate along one axis, because TPUs read both at once; other platforms do not need it.

On TPU and on NVIDIA GPUs a kernel (attention_tpu.py, attention_gpu.py) computes the shapes that its `serves` accepts.
The reference computes all other shapes. The choice depends on the device's generation (hardware.py), dtypes, head
counts, head size and page size alone.

Invariant: a row's output depends on its slot's entries at positions <= its own. Positions are walked in absolute order
with an online softmax, in turns that begin at fixed positions, and masked entries are exact zeros. So stale pages, and
the lengths of other slots, change no bit.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from jaxrl_post.kernels import attention_gpu, attention_tpu, hardware, mapped
from jaxrl_post.kernels.eight_bits import AUTO, FORMATS, codes, format_of
from jaxrl_post.kernels.sinks import joined

BIG_NEGATIVE = -1e30
TURN = 64  # positions that the reference reads at once of each row, in whole pages


KERNELS = {"cuda": attention_gpu, "tpu": attention_tpu}  # by platform


class Cache(NamedTuple):
    """Keys and values of one layer, [pages, page, 2K, H]: key of head 0, value of head 0, key of head 1, ...

    Heads of 64 are in pairs, [pages, page, K, 128]: a key and its value share a row, because a TPU's rows have 128
    numbers. In memory without tiles the order is the same. Keys and values may be codes of 8 bits. Then `scales`
    f32[pages, 2K, page] has the number by which each is multiplied, in the same order."""

    pages: Array
    scales: Array | None = None


def divided(by_axis: Callable[[int], Any], kv: str = AUTO) -> Cache:
    """Returns how the arrays of a cache are divided. by_axis: from the axis of an array's heads. kv: as in `empty`."""
    return Cache(by_axis(2), None if kv == AUTO else by_axis(1))


class Rows(NamedTuple):
    """R rows: their slot, their absolute position, whether they are real, and the page table of all slots.

    Rows of one slot are consecutive, and so are their positions. An entry of `table` >= pages is not mapped."""

    slot: Int[Array, " R"]
    position: Int[Array, " R"]
    real: Bool[Array, " R"]
    table: Int[Array, "S blocks"]


def empty(pages: int, page: int, kv_heads: int, head_dim: int, dtype, kv: str = AUTO) -> Cache:
    """Returns a zeroed cache of one layer. kv: the format of keys and values, where it is not the dtype."""
    shared = 2 if head_dim == 64 else 1
    shape = pages, page, 2 * kv_heads // shared, shared * head_dim
    if kv == AUTO:
        return Cache(jnp.zeros(shape, dtype))
    return Cache(jnp.zeros(shape, FORMATS[kv].dtype), jnp.zeros((pages, 2 * kv_heads, page), jnp.float32))


def write(cache: Cache, k: Float[Array, "R K H"], v: Float[Array, "R K H"], rows: Rows) -> Cache:
    """Returns the cache with each real row's key and value at its position. Other rows are dropped."""
    pages, page = cache.pages.shape[:2]
    where = jnp.where(rows.real, rows.table[rows.slot, rows.position // page], pages)
    both, scales, at = jnp.stack([k, v], axis=2), cache.scales, rows.position % page
    if scales is not None:
        # The barrier keeps what made keys and values from being computed once for codes and once for scales.
        both, scale = codes(jax.lax.optimization_barrier(both), -1, format_of(cache.pages.dtype))
        scale = scale.astype(jnp.float32).reshape(len(where), -1)
        # Head by head: with all heads of a position at once XLA:TPU turns the axes of all scales, and turns them back.
        heads = jnp.arange(scale.shape[1])
        scales = scales.at[where[:, None], heads, at[:, None]].set(scale, mode="drop")
    both = both.reshape(-1, *cache.pages.shape[2:]).astype(cache.pages.dtype)
    return Cache(cache.pages.at[where, at].set(both, mode="drop"), scales)


def copy(cache: Cache, source: Int[Array, " I"], target: Int[Array, " I"]) -> Cache:
    """Returns the cache with whole pages copied; a target >= pages is dropped.

    Copies position by position, as `write` does, because for whole pages XLA:TPU changes the cache's memory layout."""
    offset, scales = jnp.arange(cache.pages.shape[1]), cache.scales
    if scales is not None:
        scales = scales.at[target].set(scales[source], mode="drop")
    return Cache(cache.pages.at[target[:, None], offset].set(cache.pages[source], mode="drop"), scales)


def entries(cache: Cache, ids: Int[Array, "*some turn"], kv_heads: int, dtype: Any) -> tuple[Array, Array | None]:
    """Returns keys and values of whole pages, [*some, positions, K, 2, H], in the dtype.

    And of codes the scales, f32[*some, K, 2, positions]."""
    held = cache.pages[ids]
    held = held.reshape(*ids.shape[:-1], ids.shape[-1] * cache.pages.shape[1], kv_heads, 2, -1).astype(dtype)
    if cache.scales is None:
        return held, None
    scales = jnp.moveaxis(cache.scales[ids], -3, -2)
    return held, scales.reshape(*ids.shape[:-1], kv_heads, 2, -1)


def kv_heads(q: Float[Array, "R N H"], cache: Cache) -> int:
    return cache.pages.shape[2] * cache.pages.shape[3] // (2 * q.shape[2])


def serving(
    q: Float[Array, "R N H"], cache: Cache, platforms: frozenset[str] = hardware.PLATFORMS
) -> dict[str, Callable]:
    """Returns, by platform, the kernel that computes these shapes, where one does. See `attention`."""
    page, K = cache.pages.shape[1], kv_heads(q, cache)
    return {
        platform: kernel.attention
        for platform, kernel in KERNELS.items()
        if platform in platforms and kernel.serves(q.dtype, cache.pages.dtype, q.shape[1], K, q.shape[2], page)
    }


def attention(
    q: Float[Array, "R N H"],
    cache: Cache,
    rows: Rows,
    sinks: Float[Array, " N"] | None = None,
    *,
    scale: float,
    window: int | None,
    soft_cap: float | None,
    platforms: frozenset[str] = hardware.PLATFORMS,
) -> Float[Array, "R N H"]:
    """Returns causal attention of each row over its slot's cache, with grouped queries, up to the longest length.

    `window` w keeps positions > own - w. `soft_cap` c replaces a score by c * tanh(score / c). The softmax is in
    float32. `sinks`: of each query head, see sinks.py. `platforms`: those whose kernel may be used. Under vmap, every
    argument must have the mapped axis, but sinks must not."""
    how = dict(scale=scale, window=window, soft_cap=soft_cap)
    if not serving(q, cache, platforms):
        return reference(q, cache, rows, sinks, **how)
    return _chosen(q, cache, rows, sinks, platforms=platforms, **how)


@functools.partial(jax.jit, static_argnames=("platforms", "scale", "window", "soft_cap"))
def _chosen(q: Array, cache: Cache, rows: Rows, sinks: Array | None, *, platforms: frozenset[str], **how) -> Array:
    """Runs the platform's kernel, or the reference where it has none. Jitted, so that equal layers are traced and
    lowered once."""
    kernels = {
        platform: one_by_one(functools.partial(kernel, **how))
        for platform, kernel in serving(q, cache, platforms).items()
    }
    return jax.lax.platform_dependent(q, cache, rows, sinks, default=functools.partial(reference, **how), **kernels)


def one_by_one(kernel: Callable) -> Callable:
    """Returns `kernel` over (q, cache, rows, sinks), which under vmap runs once for each element."""

    def run(q: Array, cache: Cache, rows: Rows, *sinks: Array) -> Array:
        return kernel(q, cache.pages, rows, *sinks, **({} if cache.scales is None else {"scales": cache.scales}))

    each = mapped.alone(run)
    return lambda q, cache, rows, sinks: each(q, cache, rows, *(() if sinks is None else (sinks,)))


def reference(
    q: Float[Array, "R N H"],
    cache: Cache,
    rows: Rows,
    sinks: Float[Array, " N"] | None = None,
    *,
    scale: float,
    window: int | None,
    soft_cap: float | None,
) -> Float[Array, "R N H"]:
    """Returns `attention`, computed in jnp. A turn takes TURN positions of every row, or one page where that is longer."""
    R, N, H = q.shape
    pages, page, K = *cache.pages.shape[:2], kv_heads(q, cache)
    blocks = rows.table.shape[1]
    turn = min(max(1, TURN // page), blocks)
    size = turn * page
    table = jnp.pad(rows.table, ((0, 0), (0, -blocks % turn)), constant_values=pages)
    heads = (q * scale).reshape(R, K, N // K, H)
    live = jnp.where(rows.real, rows.position + 1, 0)

    def walk(number, carry):
        peak, mass, out = carry
        ids = jnp.minimum(jax.lax.dynamic_slice_in_dim(table, number * turn, turn, axis=1)[rows.slot], pages - 1)
        both, scales = entries(cache, ids, K, q.dtype)
        at = number * size + jnp.arange(size)
        seen = at[None, :] < live[:, None]
        if window is not None:
            seen &= at[None, :] > (rows.position - window)[:, None]
        # A stale value may be infinite, and 0 * inf is not 0.
        values = jnp.where(seen[:, :, None, None], both[:, :, :, 1], 0)
        scores = jnp.einsum("rkgh,rpkh->rkgp", heads, both[:, :, :, 0], preferred_element_type=jnp.float32)
        if scales is not None:
            scores = scores * scales[:, :, None, 0]
        if soft_cap is not None:
            scores = soft_cap * jnp.tanh(scores / soft_cap)
        seen = seen[:, None, None, :]
        high = jnp.maximum(peak, jnp.max(jnp.where(seen, scores, BIG_NEGATIVE), axis=-1))
        shrink = jnp.exp(peak - high)
        weight = jnp.where(seen, jnp.exp(scores - high[..., None]), 0.0)
        scaled = weight if scales is None else jnp.where(seen, weight * scales[:, :, None, 1], 0.0)
        mixed = jnp.einsum("rkgp,rpkh->rkgh", scaled.astype(q.dtype), values, preferred_element_type=jnp.float32)
        return high, mass * shrink + jnp.sum(weight, axis=-1), out * shrink[..., None] + mixed

    shape = (R, K, N // K)
    start = (
        jnp.full(shape, BIG_NEGATIVE, jnp.float32),
        jnp.zeros(shape, jnp.float32),
        jnp.zeros((*shape, H), jnp.float32),
    )
    peak, mass, out = jax.lax.fori_loop(0, (jnp.max(live) + size - 1) // size, walk, start)
    if sinks is not None:
        shrink, mass = joined(peak, mass, sinks.astype(jnp.float32).reshape(K, N // K))
        out = out * shrink[..., None]
    return (out / jnp.where(mass > 0, mass, 1.0)[..., None]).reshape(R, N, H).astype(q.dtype)
