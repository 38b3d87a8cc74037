"""The engine's attention over pages, against its reference, and its time beside that of reading keys and values once."""

from __future__ import annotations

import functools
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from gpu import timing
from gpu.part import Part

from jaxrl_post.kernels import attention

PAGE = 64
BATCHES, CONTEXTS, DRAFTS = (16, 64, 256), (1024, 4096, 16384), (0, 1, 3, 7, 15)
HEADS = (28, 4, 128)  # of a layer of Qwen2.5-7B: query heads, key-value heads, and numbers of each


def inputs(batch: int, context: int, drafts: int, heads: int, kv_heads: int, width: int) -> tuple:
    """Returns queries, cache and rows of `batch` rollouts of `context` positions, the last 1 + `drafts` of them rows."""
    blocks, each = -(-context // PAGE), 1 + drafts
    cache = jax.jit(
        lambda key: jax.tree.map(
            lambda x: jax.random.normal(key, x.shape, jnp.bfloat16),
            jax.eval_shape(lambda: attention.empty(batch * blocks, PAGE, kv_heads, width, jnp.bfloat16)),
        )
    )(jax.random.key(1))
    slot = np.repeat(np.arange(batch, dtype=np.int32), each)
    position = np.tile(np.arange(context - each, context, dtype=np.int32), batch)
    table = np.random.default_rng(0).permutation(batch * blocks).astype(np.int32).reshape(batch, blocks)
    q = jax.random.normal(jax.random.key(2), (batch * each, heads, width), jnp.bfloat16)
    return q, cache, attention.Rows(*map(jnp.asarray, (slot, position, np.ones(slot.size, bool), table)))


def against_reference(part: Part, shapes=((4, 200, 4), (3, 1000, 0), (16, 4096, 3))) -> None:
    """Compares outputs, with windows and soft caps and without."""
    for batch, context, drafts in shapes:
        given = inputs(batch, context, drafts, *HEADS)
        for name, how in (("plain", dict(window=None, soft_cap=None)), ("window", dict(window=150, soft_cap=30.0))):
            key = f"verify_attention.{name}_{batch}x{context}x{drafts}.max_difference"
            if not part.wants(key, 5.0):
                continue
            got, want = (
                jax.jit(functools.partial(run, scale=128**-0.5, **how))(*given).astype(jnp.float32)
                for run in (attention.attention, attention.reference)
            )
            part.figure(key, float(jnp.max(jnp.abs(got - want))), at_most=2e-2)


def times(
    part: Part, batches: Sequence[int] = BATCHES, contexts: Sequence[int] = CONTEXTS, drafted: Sequence[int] = DRAFTS
) -> None:
    """Times one layer of Qwen2.5-7B."""
    run = jax.jit(functools.partial(attention.attention, scale=128**-0.5, window=None, soft_cap=None))
    for batch, context, drafts in ((b, c, d) for c in contexts for b in batches for d in drafted):
        key = f"verify_attention.batch_{batch}_context_{context}_drafts_{drafts}"
        if part.wants(key, 4.0):
            given = inputs(batch, context, drafts, *HEADS)
            took, floor = timing.seconds(run, *given), 2 * 2 * batch * context * 4 * 128 / part.bandwidth
            part.figure(key, {"ms": 1e3 * took, "floor_ms": 1e3 * floor, "share_of_bandwidth": floor / took})
