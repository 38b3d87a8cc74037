"""Estimators of the KL from the policy to its reference, token by token. Nothing here is jitted or random.

Shapes: all arrays are [B, T], indexed at the token. A name that ends with + has the value of its estimator and the gradient
of k2, which is that of the KL (as verl).
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from jaxrl_post.algorithms.ratios import LOG_RATIO_BOUND, assert_alike

K3_BOUND = 10.0  # k3 values are clamped to +-10, as verl does


def k1(logprobs: Float[Array, "B T"], ref_logprobs: Float[Array, "B T"]) -> Float[Array, "B T"]:
    """Returns log pi - log ref: unbiased in value, of either sign (joschu.net/blog/kl-approx.html)."""
    assert_alike(logprobs, ref_logprobs)
    return logprobs - ref_logprobs


def k2(logprobs: Float[Array, "B T"], ref_logprobs: Float[Array, "B T"]) -> Float[Array, "B T"]:
    """Returns (log pi - log ref)^2 / 2: biased in value.

    Its gradient is that of the KL (joschu.net/blog/kl-approx.html).
    """
    assert_alike(logprobs, ref_logprobs)
    return (logprobs - ref_logprobs) ** 2 / 2


def k3(logprobs: Float[Array, "B T"], ref_logprobs: Float[Array, "B T"]) -> Float[Array, "B T"]:
    """Returns ref/pi - 1 - log(ref/pi): unbiased and never negative.

    Sources are joschu.net/blog/kl-approx.html and GRPO (arXiv 2402.03300, equation 4). As in verl, the log-ratio is
    clamped to +-20 and the value to +-10. A token whose value is above 10 has no gradient.
    """
    assert_alike(logprobs, ref_logprobs)
    inverse = jnp.clip(ref_logprobs - logprobs, -LOG_RATIO_BOUND, LOG_RATIO_BOUND)
    return jnp.clip(jnp.exp(inverse) - inverse - 1.0, -K3_BOUND, K3_BOUND)


def absolute(logprobs: Float[Array, "B T"], ref_logprobs: Float[Array, "B T"]) -> Float[Array, "B T"]:
    """Returns |log pi - log ref|: a distance, and no estimate of the KL (verl's "abs")."""
    assert_alike(logprobs, ref_logprobs)
    return jnp.abs(logprobs - ref_logprobs)


def k1_plus(logprobs: Float[Array, "B T"], ref_logprobs: Float[Array, "B T"]) -> Float[Array, "B T"]:
    """Returns k1 with the gradient of k2 (verl's "k1+")."""
    return _with_slope_of_k2(k1(logprobs, ref_logprobs), logprobs, ref_logprobs)


def k3_plus(logprobs: Float[Array, "B T"], ref_logprobs: Float[Array, "B T"]) -> Float[Array, "B T"]:
    """Returns k3 with the gradient of k2 (verl's "k3+"). So a token whose value is above 10 has a gradient too."""
    return _with_slope_of_k2(k3(logprobs, ref_logprobs), logprobs, ref_logprobs)


KL_ESTIMATORS = {"k1": k1, "k2": k2, "k3": k3, "abs": absolute, "k1+": k1_plus, "k3+": k3_plus}


def _with_slope_of_k2(values: jax.Array, logprobs: jax.Array, ref_logprobs: jax.Array) -> jax.Array:
    slope = k2(logprobs, ref_logprobs)
    return jax.lax.stop_gradient(values) + slope - jax.lax.stop_gradient(slope)
