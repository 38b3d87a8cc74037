"""The losses of the Tinker API, as its documentation writes them. Every one is summed over tokens, never averaged.

Shapes: all arrays are [B, T], indexed at the input token whose next token is the target. A batch holds weights as
loss_weights, advantages as advantages, and the sampler's log-probs as rollout_logprobs.

Losses are defined at every token, so the caller masks padding. Nothing is clamped beside what a formula says.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from jaxrl_post.trainer.packing import Batch

Bounds = Mapping[str, Any]  # loss_fn_config, scalars by name
_CLIPS = {"clip_low_threshold": 0.8, "clip_high_threshold": 1.2}


def cross_entropy(logprobs: Float[Array, "B T"], batch: Batch, bounds: Bounds) -> Float[Array, "B T"]:
    """Returns -weights logprobs."""
    return -logprobs * batch.loss_weights


def importance_sampling(logprobs: Float[Array, "B T"], batch: Batch, bounds: Bounds) -> Float[Array, "B T"]:
    """Returns -r A, r = exp(logprobs - the sampler's)."""
    return -jnp.exp(logprobs - batch.rollout_logprobs) * batch.advantages


def ppo(logprobs: Float[Array, "B T"], batch: Batch, bounds: Bounds) -> Float[Array, "B T"]:
    """Returns -min(r A, clip(r, low, high) A) (PPO, arXiv 1707.06347, equation 7). Bounds are of the ratio itself."""
    ratio = jnp.exp(logprobs - batch.rollout_logprobs)
    return -jnp.minimum(ratio * batch.advantages, _clipped(ratio, bounds) * batch.advantages)


def cispo(logprobs: Float[Array, "B T"], batch: Batch, bounds: Bounds) -> Float[Array, "B T"]:
    """Returns -sg(clip(r, low, high)) logprobs A (CISPO, arXiv 2506.13585, section 3.1)."""
    ratio = jax.lax.stop_gradient(jnp.exp(logprobs - batch.rollout_logprobs))
    return -_clipped(ratio, bounds) * logprobs * batch.advantages


def dro(logprobs: Float[Array, "B T"], batch: Batch, bounds: Bounds) -> Float[Array, "B T"]:
    """Returns -(logprobs A - beta (log r)^2 / 2) (DRO, arXiv 2405.19107)."""
    gap = logprobs - batch.rollout_logprobs
    return -(logprobs * batch.advantages - 0.5 * bounds["beta"] * gap * gap)


def _clipped(ratio: Float[Array, "B T"], bounds: Bounds) -> Float[Array, "B T"]:
    return jnp.clip(ratio, bounds["clip_low_threshold"], bounds["clip_high_threshold"])


@dataclass(frozen=True, kw_only=True)
class Loss:
    """A loss, the tensors that a datum needs beside its targets, and the names in loss_fn_config.

    `bounds`: name -> default, None where a request must give it. `optional`: tensors that count as ones where left out.
    """

    of: Callable[..., Any]
    needs: tuple[str, ...] = ()
    optional: tuple[str, ...] = ()
    bounds: Mapping[str, float | None] = field(default_factory=dict)


_SAMPLED = ("logprobs", "advantages")
LOSSES = {
    "cross_entropy": Loss(of=cross_entropy, optional=("weights",)),
    "importance_sampling": Loss(of=importance_sampling, needs=_SAMPLED),
    "ppo": Loss(of=ppo, needs=_SAMPLED, bounds=_CLIPS),
    "cispo": Loss(of=cispo, needs=_SAMPLED, bounds=_CLIPS),
    "dro": Loss(of=dro, needs=_SAMPLED, bounds={"beta": None}),
}
