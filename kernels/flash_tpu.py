"""Attention of packed rows on TPUs, forward and backward: jax's Splash attention, one kernel for each row of the batch.

The causal mask and the window are known when the kernel is made, and blocks outside of them are left out. Segments are
compared inside the blocks. The backward pass is the unfused one. The fused one keeps a gradient of the queries for each
block of keys. That is 14.6 GiB a layer for a row of 32,768 tokens with 28 heads of 128.

Sinks are Splash's own: a query's softmax begins with its head's sink, at mass 1. Their gradient is summed outside of the
kernels, from products in the dtype of the queries.

Blocks depend on the shape alone, so equal inputs give equal bits. Refuses shapes for which `serves` is False.
"""

from __future__ import annotations

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jaxrl_post.kernels.pallas_tpu import MultiHeadMask, splash_attention

LANES = 128
OWN = 1024  # most tokens of the side that stays in the chip: it decides how often the other side is read
OTHER = 512  # most tokens of the side that is walked
NEEDS = "bfloat16 or float32, heads of 64, 128, 256 or 512, and rows of a multiple of 128 tokens"


def serves(dtype: Any, heads: int, kv_heads: int, head_dim: int, tokens: int) -> bool:
    return (
        dtype in (jnp.bfloat16, jnp.float32)
        and tokens % LANES == 0
        and head_dim in (64, 128, 256, 512)
        and heads % kv_heads == 0
    )


def attention(
    q: Float[Array, "B T N H"],
    k: Float[Array, "B T K H"],
    v: Float[Array, "B T K H"],
    segment_ids: Int[Array, "B T"],
    sinks: Float[Array, " N"] | None = None,
    *,
    scale: float,
    window: int | None,
    soft_cap: float | None,
    saved: str = "attended",
    interpret: bool = False,
) -> Float[Array, "B T N H"]:
    """Returns causal attention inside the segments of packed rows.

    Args:
      sinks: for each query head a score without a value, neither scaled nor capped (gpt-oss, arXiv 2508.10925).
      window: a query sees its own position and the window - 1 before it.
      saved: name under which a remat policy may keep the output and the log of the mass.
      interpret: True runs without a device.
    """
    (B, T, N, _), own = q.shape, None
    kernel = _kernel(N, T, window, soft_cap, saved, interpret)
    if sinks is not None:
        own = _with_wide_slope(jnp.broadcast_to(sinks.astype(jnp.float32), (B, N)))

    def row(q, k, v, ids, own):
        heads = (jnp.swapaxes(x, 0, 1) for x in ((q * scale).astype(q.dtype), k, v))
        return jnp.swapaxes(kernel(*heads, segment_ids=splash_attention.SegmentIds(ids, ids), sinks=own), 0, 1)

    return jax.vmap(row)(q, k, v, segment_ids, own).astype(q.dtype)


@jax.custom_vjp
def _with_wide_slope(x: Float[Array, "B N"]) -> Float[Array, "B N"]:
    """Returns `x`. Its gradient becomes float32: Splash returns that of the sinks in the dtype of the queries."""
    return x


_with_wide_slope.defvjp(lambda x: (x, None), lambda _, slope: (slope.astype(jnp.float32),))


def _kernel(heads: int, tokens: int, window: int | None, soft_cap: float | None, saved: str, interpret: bool) -> Any:
    """Returns the kernel of one row. It holds small arrays, so it is made where it is traced."""
    shape = (tokens, tokens)
    mask = (
        splash_attention.CausalMask(shape)
        if window is None
        else splash_attention.LocalMask(shape, window_size=(window - 1, 0), offset=0)
    )
    return splash_attention.make_splash_mha(
        MultiHeadMask([mask] * heads),
        block_sizes=_blocks(tokens),
        head_shards=1,
        q_seq_shards=1,
        attn_logits_soft_cap=soft_cap,
        residual_checkpoint_name=saved,
        interpret=interpret,
    )


@functools.cache
def _blocks(tokens: int) -> Any:
    own, other = (math.gcd(tokens, size) for size in (OWN, OTHER))
    return splash_attention.BlockSizes(
        block_q=own,
        block_kv=other,
        block_kv_compute=other,
        block_q_dkv=other,
        block_kv_dkv=own,
        block_kv_dkv_compute=other,
        block_q_dq=own,
        block_kv_dq=other,
    )
