"""Attention of the wide prompt program: rows come in tiles of one prompt, and a tile reads each of its pages once.

All tiles have equally many rows. A tile holds consecutive positions of one prompt, its real rows first. Cache and rows
are those of attention.py. A row's `slot` is its tile, and `table` has a row for each tile.

On a platform whose attention kernel computes the shapes, that kernel computes the tiles. The reference computes all
others; several pages are read in a turn.

Invariant: a row's output depends on the entries of its tile's prompt alone. The place of its tile among the others, the
other tiles and stale pages change no bit.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jaxrl_post.kernels import attention_gpu, attention_tpu, hardware
from jaxrl_post.kernels.attention import BIG_NEGATIVE, Cache, Rows, entries, kv_heads, one_by_one, serving
from jaxrl_post.kernels.sinks import joined

TURN = 256  # positions that the reference reads at once

KERNELS = {"cuda": attention_gpu.attention, "tpu": attention_tpu.prompt_attention}  # by platform


def rows_of(
    first: Int[Array, " tiles"], count: Int[Array, " tiles"], table: Int[Array, "tiles blocks"], tile: int
) -> Rows:
    """Returns the rows of tiles of `tile` rows that begin at position `first` and have `count` real rows."""
    offset = jnp.arange(tile, dtype=jnp.int32)
    tiles = jnp.arange(first.shape[0], dtype=jnp.int32) + 0 * first  # so that under vmap it has the mapped axis too
    real = offset < count[:, None]
    position = jnp.where(real, first[:, None] + offset, 0)
    return Rows(jnp.repeat(tiles, tile), position.reshape(-1), real.reshape(-1), table)


def turn_pages(page: int, blocks: int) -> int:
    """Returns the pages that the reference reads of a tile in one turn."""
    return min(max(1, TURN // page), blocks)


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
    """Returns causal attention of each row over its prompt's cache, as attention.attention does."""
    how = dict(scale=scale, window=window, soft_cap=soft_cap)
    if not serving(q, cache, platforms):
        return reference(q, cache, rows, sinks, **how)
    return _chosen(q, cache, rows, sinks, platforms=platforms, **how)


@functools.partial(jax.jit, static_argnames=("platforms", "scale", "window", "soft_cap"))
def _chosen(q: Array, cache: Cache, rows: Rows, sinks: Array | None, *, platforms: frozenset[str], **how) -> Array:
    """Runs the platform's kernel, or the reference where it has none. Jitted, so that equal layers are traced and
    lowered once."""
    kernels = {
        platform: one_by_one(functools.partial(KERNELS[platform], **how)) for platform in serving(q, cache, platforms)
    }
    return jax.lax.platform_dependent(q, cache, rows, sinks, default=functools.partial(reference, **how), **kernels)


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
    """Returns `attention`, computed in jnp. Every turn reads the same stretch of positions for all tiles."""
    R, N, H = q.shape
    pages, page, K = *cache.pages.shape[:2], kv_heads(q, cache)
    T, blocks = rows.table.shape
    tile, turn = R // T, turn_pages(page, blocks)
    size = turn * page
    heads = (q * scale).reshape(T, tile, K, N // K, H)
    position, real = rows.position.reshape(T, tile), rows.real.reshape(T, tile)
    table = jnp.pad(rows.table, ((0, 0), (0, -blocks % turn)), constant_values=pages)
    turns = (jnp.max(jnp.where(rows.real, rows.position + 1, 0)) + size - 1) // size

    def walk(number, carry):
        peak, mass, out = carry
        ids = jnp.minimum(jax.lax.dynamic_slice_in_dim(table, number * turn, turn, axis=1), pages - 1)
        both, scales = entries(cache, ids, K, q.dtype)
        at = number * size + jnp.arange(size)
        seen = real[..., None] & (at <= position[..., None])
        if window is not None:
            seen &= at > (position - window)[..., None]
        # A stale value may be infinite, and 0 * inf is not 0.
        values = jnp.where(jnp.any(seen, axis=1)[..., None, None], both[:, :, :, 1], 0)
        scores = jnp.einsum("tqkgh,tpkh->tkgqp", heads, both[:, :, :, 0], preferred_element_type=jnp.float32)
        if scales is not None:
            scores = scores * scales[:, :, None, 0, None]
        if soft_cap is not None:
            scores = soft_cap * jnp.tanh(scores / soft_cap)
        seen = seen[:, None, None]
        high = jnp.maximum(peak, jnp.max(jnp.where(seen, scores, BIG_NEGATIVE), axis=-1))
        shrink = jnp.exp(peak - high)
        weight = jnp.where(seen, jnp.exp(scores - high[..., None]), 0.0)
        scaled = weight if scales is None else jnp.where(seen, weight * scales[:, :, None, 1, None], 0.0)
        mixed = jnp.einsum("tkgqp,tpkh->tkgqh", scaled.astype(q.dtype), values, preferred_element_type=jnp.float32)
        return high, mass * shrink + jnp.sum(weight, axis=-1), out * shrink[..., None] + mixed

    shape = (T, K, N // K, tile)
    start = (
        jnp.full(shape, BIG_NEGATIVE, jnp.float32),
        jnp.zeros(shape, jnp.float32),
        jnp.zeros((*shape, H), jnp.float32),
    )
    peak, mass, out = jax.lax.fori_loop(0, turns, walk, start)
    if sinks is not None:
        shrink, mass = joined(peak, mass, sinks.astype(jnp.float32).reshape(K, N // K, 1))
        out = out * shrink[..., None]
    out = out / jnp.where(mass > 0, mass, 1.0)[..., None]
    return out.transpose(0, 3, 1, 2, 4).reshape(R, N, H).astype(q.dtype)
