"""The KL from the policy to its reference: estimators, token by token, and its coefficient in the reward.

Shapes: all arrays are [B, T], indexed at the token. A name that ends with + has the value of its estimator and the gradient
of k2, which is that of the KL (as verl). Nothing here is jitted or random.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from jaxrl_post.algorithms.logprobs import LOG_RATIO_BOUND, assert_alike
from jaxrl_post.config import AlgorithmConfig

MOST = 0.2  # of the relative error of one step of the coefficient, as InstructGPT's
K3_BOUND = 10.0  # k3 values are clamped to +-10, as verl does


def k1(logprobs: Float[Array, "B T"], ref_logprobs: Float[Array, "B T"]) -> Float[Array, "B T"]:
    """Returns log pi - log ref: unbiased in value, of either sign (joschu.net/blog/kl-approx.html)."""
    assert_alike(logprobs, ref_logprobs)
    return logprobs - ref_logprobs


def k2(logprobs: Float[Array, "B T"], ref_logprobs: Float[Array, "B T"]) -> Float[Array, "B T"]:
    """Returns (log pi - log ref)^2 / 2: biased in value. Its gradient is that of the KL (joschu.net/blog/kl-approx.html)."""
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


class KlController:
    """The coefficient: fixed with kl_target 0, else moved towards the target after every optimizer step. Host code.

    It follows from the KL of the rollouts alone. All pieces of a round get the same one.
    """

    def __init__(self, algorithm: AlgorithmConfig):
        self._target, self._horizon = algorithm.kl_target, algorithm.kl_horizon
        self.value = algorithm.kl_coef

    def applied(self, algorithm: AlgorithmConfig) -> AlgorithmConfig:
        return dataclasses.replace(algorithm, kl_coef=self.value)

    def update(self, kls: Sequence[float]) -> None:
        """Moves the coefficient by the KL of n rollouts, in nats per token: value *= 1 + e n / kl_horizon.

        e = clip(mean KL / kl_target - 1, -0.2, 0.2). The source is arXiv 1909.08593, section 2.2, as in verl.
        """
        if not self._target or not kls:
            return
        error = np.clip(np.mean(kls) / self._target - 1.0, -MOST, MOST)
        self.value *= float(1.0 + error * len(kls) / self._horizon)

    def state_dict(self) -> dict:
        return {"value": self.value}

    def load_state_dict(self, state: Mapping) -> None:
        self.value = state["value"]
