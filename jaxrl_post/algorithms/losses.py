"""Per-token losses, KL estimators and the three ways to aggregate them. Nothing here is jitted or random.

Shapes: all per-token arrays are [B, T] and indexed at the token (its log-prob, its advantage, its mask). An aggregator
returns a numerator and a count, both plain sums over sequences: sums over micro-batches and devices add, and ONE
division numerator / count at commit gives the paper's formula for the whole batch. The count is of what was sampled
and scored, before any clipping or rejection: a rejected token lowers the numerator, never the count.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from jaxrl_post.config import Algorithm

LOG_RATIO_BOUND = 20.0  # log-ratios are clamped to +-20 before exp, as verl does
K3_BOUND = 10.0  # k3 values are clamped to +-10, as verl does


def vanilla(logprobs: Float[Array, "B T"], old_logprobs: Float[Array, "B T"], advantages: Float[Array, "B T"],
            algorithm: Algorithm) -> tuple[Float[Array, "B T"], Float[Array, "B T"]]:
    """max(-A r, -A clip(r, 1 - low, 1 + high)), r = exp(logprobs - old_logprobs) (PPO, arXiv 1707.06347, equation 7;
    two bounds: DAPO, arXiv 2503.14476, equation 10).

    Dual clip is off (verl has it on at 3). A gradient flows where the unclipped branch is the larger one, ties
    included.

    Returns:
      losses, and 1 where the clipped branch is the larger one (verl's pg_clipfrac).
    """
    _assert_alike(logprobs, old_logprobs, advantages)
    ratio = jnp.exp(log_ratio(logprobs, old_logprobs))
    free = -advantages * ratio
    bound = -advantages * jnp.clip(ratio, 1.0 - algorithm.clip_ratio_low, 1.0 + algorithm.clip_ratio_high)
    clipped = bound > free
    return jnp.where(clipped, bound, free), clipped.astype(logprobs.dtype)


def sft(logprobs: Float[Array, "B T"], old_logprobs: Float[Array, "B T"] | None, advantages: Float[Array, "B T"],
        algorithm: Algorithm) -> tuple[Float[Array, "B T"], Float[Array, "B T"]]:
    """-logprobs: the negative log-likelihood of demonstrations. Nothing is clipped; old log-probs are not read."""
    _assert_alike(logprobs, advantages)
    return -logprobs, jnp.zeros_like(logprobs)


LOSSES = {"vanilla": vanilla, "sft": sft}
NEEDS_OLD_LOGPROBS = {"vanilla": True, "sft": False}


def log_ratio(logprobs: Float[Array, "B T"], old_logprobs: Float[Array, "B T"]) -> Float[Array, "B T"]:
    """logprobs - old_logprobs, clamped to +-20."""
    return jnp.clip(logprobs - old_logprobs, -LOG_RATIO_BOUND, LOG_RATIO_BOUND)


def k1(logprobs: Float[Array, "B T"], ref_logprobs: Float[Array, "B T"]) -> Float[Array, "B T"]:
    """log pi - log ref: unbiased in value, of either sign (joschu.net/blog/kl-approx.html)."""
    _assert_alike(logprobs, ref_logprobs)
    return logprobs - ref_logprobs


def k2(logprobs: Float[Array, "B T"], ref_logprobs: Float[Array, "B T"]) -> Float[Array, "B T"]:
    """(log pi - log ref)^2 / 2: biased in value; its gradient is that of the KL (joschu.net/blog/kl-approx.html)."""
    _assert_alike(logprobs, ref_logprobs)
    return (logprobs - ref_logprobs) ** 2 / 2


def k3(logprobs: Float[Array, "B T"], ref_logprobs: Float[Array, "B T"]) -> Float[Array, "B T"]:
    """ref/pi - 1 - log(ref/pi): unbiased and never negative (joschu.net/blog/kl-approx.html; GRPO, arXiv 2402.03300,
    equation 4). Log-ratio clamped to +-20 and value to +-10, as verl does."""
    _assert_alike(logprobs, ref_logprobs)
    inverse = jnp.clip(ref_logprobs - logprobs, -LOG_RATIO_BOUND, LOG_RATIO_BOUND)
    return jnp.clip(jnp.exp(inverse) - inverse - 1.0, -K3_BOUND, K3_BOUND)


KL_ESTIMATORS = {"k1": k1, "k2": k2, "k3": k3}


def token_mean(losses: Float[Array, "B T"], mask: Bool[Array, "B T"], segment_ids: Int[Array, "B T"],
               max_tokens: int) -> tuple[Float[Array, ""], Int[Array, ""]]:
    """Sum over tokens, number of tokens: every token weighs the same (DAPO, arXiv 2503.14476, equation 8)."""
    _assert_maskable(losses, mask, segment_ids)
    return jnp.sum(jnp.where(mask, losses, 0.0)), jnp.sum(mask, dtype=jnp.int32)


def seq_mean_token_mean(losses: Float[Array, "B T"], mask: Bool[Array, "B T"], segment_ids: Int[Array, "B T"],
                        max_tokens: int) -> tuple[Float[Array, ""], Int[Array, ""]]:
    """Sum over sequences of their token means, number of sequences (GRPO, arXiv 2402.03300, equation 3)."""
    _assert_maskable(losses, mask, segment_ids)
    lengths, starts = _sequences(mask, segment_ids)
    weighted = jnp.where(mask, losses / jnp.maximum(lengths, 1).astype(losses.dtype), 0.0)
    return jnp.sum(weighted), jnp.sum(starts, dtype=jnp.int32)


def seq_mean_token_sum_norm(losses: Float[Array, "B T"], mask: Bool[Array, "B T"], segment_ids: Int[Array, "B T"],
                            max_tokens: int) -> tuple[Float[Array, ""], Int[Array, ""]]:
    """Sum over tokens / max_tokens, number of sequences: no length bias (Dr. GRPO, arXiv 2503.20783, section 3.1).

    `max_tokens` is the longest answer the run allows (sampling.max_tokens): one constant for all, where verl takes
    loss_scale_factor, else the padded length of the batch at hand.
    """
    _assert_maskable(losses, mask, segment_ids)
    _, starts = _sequences(mask, segment_ids)
    return jnp.sum(jnp.where(mask, losses, 0.0)) / max_tokens, jnp.sum(starts, dtype=jnp.int32)


AGGREGATIONS = {"token-mean": token_mean, "seq-mean-token-mean": seq_mean_token_mean,
                "seq-mean-token-sum-norm": seq_mean_token_sum_norm}


def _sequences(mask: jax.Array, segment_ids: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Per token: the number of unmasked tokens of its sequence, and whether it is the first of them.

    A comparison of all pairs: it fuses into one reduction, where a segment sum would be a scatter.
    """
    same = (segment_ids[:, :, None] == segment_ids[:, None, :]) & mask[:, None, :]
    time = jnp.arange(mask.shape[1])
    upto = jnp.sum(same & (time[None, :, None] >= time[None, None, :]), axis=-1, dtype=jnp.int32)
    return jnp.sum(same, axis=-1, dtype=jnp.int32), mask & (upto == 1)


def _assert_alike(*arrays: jax.Array) -> None:
    for array in arrays:
        assert array.ndim == 2 and array.shape == arrays[0].shape, [a.shape for a in arrays]
        assert array.dtype == arrays[0].dtype and jnp.issubdtype(array.dtype, jnp.floating), [a.dtype for a in arrays]


def _assert_maskable(losses: jax.Array, mask: jax.Array, segment_ids: jax.Array) -> None:
    _assert_alike(losses)
    assert mask.shape == segment_ids.shape == losses.shape, (mask.shape, segment_ids.shape, losses.shape)
    assert mask.dtype == jnp.bool_ and jnp.issubdtype(segment_ids.dtype, jnp.integer), (mask.dtype, segment_ids.dtype)
