"""Plain `attend` and `recur` over whole texts: what tests give the decoder when no cache is the subject."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from jaxrl_post.models import gated_delta


def dense(positions, segments=None):
    """attend for q [B, T, N, H]: a token sees its own segment (default: one) at positions not after its own."""
    segments = jnp.zeros_like(positions) if segments is None else segments
    distance = positions[:, :, None] - positions[:, None, :]
    same = segments[:, :, None] == segments[:, None, :]

    def attend(layer, q, k, v, cache, *, scale, window, soft_cap, sinks=None):
        k, v = (jnp.repeat(x, q.shape[2] // x.shape[2], axis=2) for x in (k, v))
        wide = jnp.promote_types(q.dtype, jnp.float32)
        scores = jnp.einsum("btnh,bsnh->bnts", q, k, preferred_element_type=wide) * scale
        if soft_cap is not None:
            scores = soft_cap * jnp.tanh(scores / soft_cap)
        seen = same & (distance >= 0) & (distance < (window or jnp.iinfo(jnp.int32).max))
        scores = jnp.where(seen[:, None], scores, -jnp.inf)
        if sinks is not None:  # one more key, whose weight is dropped
            scores = jnp.concatenate(
                [scores, jnp.broadcast_to(sinks.astype(wide)[:, None, None], (*scores.shape[:-1], 1))], axis=-1
            )
        weights = jnp.exp(scores - scores.max(-1, keepdims=True))
        weights = weights / weights.sum(-1, keepdims=True)
        weights = weights if sinks is None else weights[..., :-1]
        return jnp.einsum("bnts,bsnh->btnh", weights.astype(v.dtype), v), cache

    return attend


def in_order(layer, inputs, g, beta, weights, cache):
    """recur for inputs [B, T, heads, size]: each of B texts token by token, from a state of zeros."""
    one = jnp.zeros(g.shape[:2], jnp.int32)
    made = jax.tree.map(lambda x, w: gated_delta.convolved(x.astype(w.dtype), jnp.asarray(w), one), inputs, weights)
    tokens = gated_delta.per_value_head(gated_delta.keyed(made, g, beta))
    tokens = jax.tree.map(lambda x: jnp.moveaxis(x, 1, 0), tokens)
    start = jnp.zeros((*tokens.k.shape[1:], tokens.v.shape[-1]), tokens.v.dtype)
    _, out = gated_delta.steps(start, tokens, jnp.ones(one.T.shape, bool))
    return jnp.moveaxis(out, 0, 1), cache
