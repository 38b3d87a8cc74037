"""Choices of form that were made by measurement on CPU: each pair side by side, milliseconds, medians of interleaved
runs.

- Embedding: by gather, or by a one-hot product.
- The chosen log-prob: by comparison, or by take_along_axis, forward and backward at several vocabularies.
- The trainer's attention: in query blocks, or over all pairs.
"""

from __future__ import annotations

import os
import statistics
import time

os.environ.setdefault("JAX_PLATFORMS", "cpu")

TOKENS, WIDTH, TURNS = 2048, 96, 15


def bench(record) -> None:
    import jax
    import jax.numpy as jnp
    import numpy as np

    from jaxrl_post.algorithms import logprobs
    from jaxrl_post.trainer import attention

    noise = np.random.default_rng(0)

    def normal(*shape):
        return jnp.asarray(noise.normal(size=shape), jnp.float32)

    for vocab in (32, 512, 8192):
        ids, table, logits = jnp.asarray(noise.integers(0, vocab, TOKENS)), normal(vocab, WIDTH), normal(TOKENS, vocab)
        out = normal(TOKENS, WIDTH)
        _pair(
            record,
            f"embedding_vocab_{vocab}",
            (table, ids, out),
            gather=lambda table, ids, out: jnp.vdot(table[ids], out),
            one_hot=lambda table, ids, out: jnp.vdot(jax.nn.one_hot(ids, table.shape[0]) @ table, out),
        )
        _pair(
            record,
            f"chosen_logprob_vocab_{vocab}",
            (logits, ids),
            compare=lambda x, ids: logprobs.of_logits(x, ids)[0].sum(),
            take_along_axis=lambda x, ids: jnp.take_along_axis(jax.nn.log_softmax(x), ids[:, None], axis=-1).sum(),
        )

    B, T, N, H = 8, 256, 6, 16
    segments = jnp.asarray(np.repeat(np.arange(1, 9), 32)[None].repeat(B, 0))
    q, k, v, out = (normal(B * T, N, H) for _ in range(4))

    def blocks(q, k, v, out, segments):
        attend = attention.packed(segments)
        return jnp.vdot(attend(0, q, k, v, None, scale=0.25, window=None, soft_cap=None)[0], out)

    def all_pairs(q, k, v, out, segments):
        mask = (segments[:, :, None] == segments[:, None, :]) & jnp.tril(jnp.ones((T, T), bool))
        q, k, v = (x.reshape(B, T, N, H) for x in (q, k, v))
        weights = jax.nn.softmax(jnp.where(mask[:, None], jnp.einsum("btnh,bsnh->bnts", q, k) * 0.25, -1e30), axis=-1)
        return jnp.vdot(jnp.einsum("bnts,bsnh->btnh", weights, v), out.reshape(B, T, N, H))

    _pair(record, "packed_attention", (q, k, v, out, segments), blocks=blocks, all_pairs=all_pairs)


def _pair(record, name: str, values: tuple, **forms) -> None:
    """Returns the medians of the gradient by the floating values, each form in turn."""
    import jax
    import jax.numpy as jnp

    floats = tuple(i for i, x in enumerate(values) if jnp.issubdtype(x.dtype, jnp.floating) and i < 3)
    calls = {word: jax.jit(jax.grad(form, argnums=floats)) for word, form in forms.items()}
    seconds = {word: [] for word in calls}
    for turn in range(TURNS + 2):
        for word, call in calls.items():
            begun = time.perf_counter()
            jax.block_until_ready(call(*values))
            if turn >= 2:
                seconds[word].append(time.perf_counter() - begun)
    record.figure(f"{name}_ms", {word: 1e3 * statistics.median(times) for word, times in seconds.items()})
