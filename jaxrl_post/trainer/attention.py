"""The trainer's `attend`: causal attention inside the segments of packed rows.

Invariant: a token sees itself and the earlier tokens of its own segment only. Masked pairs have weight exactly zero.
Padding is segment 0 and sees itself, so no softmax is empty.

Queries are processed in blocks. Each block sees the keys up to its own end and is recomputed in the backward pass. So
the scores of only one block exist at a time, and the upper triangle is not computed.

On CPU this takes about half the time of computing all pairs at once. Source: scripts/results/choices.json, by
scripts/bench.py choices.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

BLOCK = 64  # smallest block of queries
BLOCKS = 8  # most blocks of a row, as every block is unrolled in every layer


def packed(segment_ids: Int[Array, "B T"], sharding: jax.sharding.Sharding | None = None) -> Callable:
    """Returns `attend` for hidden states whose tokens are flattened to [B*T], as the decoder wants them.

    Queries q are [B*T, N, H].

    Args:
      sharding: of q, k and v as [B, T, N, H] (mesh.heads_sharding), or None on one device.
    """
    B, T = segment_ids.shape
    size = max(BLOCK, -(-T // BLOCKS))

    def attend(
        layer: int | Int[Array, ""],
        q: Float[Array, "BT N H"],
        k: Float[Array, "BT K H"],
        v: Float[Array, "BT K H"],
        cache: Any,
        *,
        scale: float,
        window: int | None,
        soft_cap: float | None,
    ) -> tuple[Float[Array, "BT N H"], Any]:
        def rows(x):
            x = x.reshape(B, T, *x.shape[1:])
            return x if sharding is None else jax.lax.with_sharding_constraint(x, sharding)

        q, k, v = rows(q), rows(k), rows(v)
        block = jax.checkpoint(lambda q, k, v, mask: _block(q, k, v, mask, scale, soft_cap))
        outs = []
        for start in range(0, T, size):
            end = min(start + size, T)
            first = 0 if window is None else max(0, start - window + 1)
            mask = _mask(segment_ids, start, end, first, window)
            outs.append(block(q[:, start:end], k[:, first:end], v[:, first:end], mask))
        out = jnp.concatenate(outs, axis=1)
        return out.reshape(B * T, *out.shape[2:]), cache

    return attend


def _mask(segment_ids: jax.Array, start: int, end: int, first: int, window: int | None) -> jax.Array:
    """Returns bool[B, queries, keys]: True where the query sees the key.

    Positions rise by one inside a segment, so distances in the row are distances in the segment.
    """
    behind = jnp.arange(start, end)[:, None] - jnp.arange(first, end)[None, :]
    near = behind >= 0 if window is None else (behind >= 0) & (behind < window)
    return (segment_ids[:, start:end, None] == segment_ids[:, None, first:end]) & near


def _block(
    q: Float[Array, "B T N H"],
    k: Float[Array, "B S K H"],
    v: Float[Array, "B S K H"],
    mask,
    scale: float,
    soft_cap: float | None,
) -> Float[Array, "B T N H"]:
    """Returns softmax attention of one block of queries.

    Scores are float32 or wider. The output is divided by the sum of the softmax weights at the end.
    """
    B, T, N, H = q.shape
    K = k.shape[2]
    wide = jnp.promote_types(q.dtype, jnp.float32)
    scores = scale * jnp.einsum("btkgh,bskh->bkgts", q.reshape(B, T, K, N // K, H), k, preferred_element_type=wide)
    if soft_cap is not None:
        scores = soft_cap * jnp.tanh(scores / soft_cap)
    scores = jnp.where(mask[:, None, None], scores, jnp.finfo(wide).min / 2)
    weights = jnp.exp(scores - jax.lax.stop_gradient(jnp.max(scores, axis=-1, keepdims=True)))
    total = jnp.moveaxis(jnp.sum(weights, axis=-1), 3, 1)
    out = jnp.einsum("bkgts,bskh->btkgh", weights.astype(v.dtype), v, preferred_element_type=wide)
    return (out / total[..., None]).astype(q.dtype).reshape(B, T, N, H)
