"""Ratios of two policies' probabilities at tokens, and their means over the sequences of packed rows.

Shapes: all arrays are [B, T], indexed at the token. A row has several packed sequences, separated by segment_ids.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

LOG_RATIO_BOUND = 20.0  # log-ratios are clamped to +-20 before exp, as verl does


def log_ratio(logprobs: Float[Array, "B T"], old_logprobs: Float[Array, "B T"]) -> Float[Array, "B T"]:
    """Returns logprobs - old_logprobs, clamped to +-20."""
    return jnp.clip(logprobs - old_logprobs, -LOG_RATIO_BOUND, LOG_RATIO_BOUND)


def sequence_mean(
    values: Float[Array, "B T"], mask: Bool[Array, "B T"], segment_ids: Int[Array, "B T"]
) -> Float[Array, "B T"]:
    """Returns, at each token, the mean of the masked values of its segment of the row, or 0 without masked values.

    All pairs of tokens are compared. The comparison fuses into reductions, where a segment sum would be a scatter.
    """
    same = (segment_ids[:, :, None] == segment_ids[:, None, :]) & mask[:, None, :]
    total = jnp.sum(jnp.where(same, values[:, None, :], 0.0), axis=-1)
    return total / jnp.maximum(jnp.sum(same, axis=-1, dtype=jnp.int32), 1).astype(values.dtype)


def sequence_length(mask: Bool[Array, "B T"], segment_ids: Int[Array, "B T"]) -> Int[Array, "B T"]:
    """Returns, at each token, the number of masked tokens of its segment of the row."""
    return jnp.sum((segment_ids[:, :, None] == segment_ids[:, None, :]) & mask[:, None, :], axis=-1, dtype=jnp.int32)


def assert_alike(*arrays: jax.Array) -> None:
    """Asserts one shape [B, T] and one floating dtype."""
    for array in arrays:
        assert array.ndim == 2 and array.shape == arrays[0].shape, [a.shape for a in arrays]
        assert array.dtype == arrays[0].dtype and jnp.issubdtype(array.dtype, jnp.floating), [a.dtype for a in arrays]
