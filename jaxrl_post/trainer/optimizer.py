"""The optimizer: clipping, AdamW, its learning-rate schedule, and which weights decay.

The learner applies the learning rate, by its own step. Invariant: the rate is a function of the optimizer step alone,
so a skipped update does not shift the schedule.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import optax

from jaxrl_post.config import OptimizerConfig


@dataclass(frozen=True, kw_only=True)
class Optimizer:
    """What one step applies, in order: `clip` to the gradient and its norm, `transform`, `rate`.

    `first`: the first step that moves weights and moments.
    """

    clip: Callable[[Any, Any], Any]
    transform: optax.GradientTransformation
    rate: Callable[[Any], jax.Array]
    first: int = 0


def optimizer(given: OptimizerConfig, decayed: Any, steps: int, first: int = 0) -> Optimizer:
    """Returns the optimizer of a run of `steps` steps. `decayed`: as for `transform`; `first`: as in Optimizer.

    Raises:
      ValueError: the warm-up is longer than the run.
    """
    return Optimizer(clip=clipping(given), transform=transform(given, decayed), rate=rate(given, steps), first=first)


def rate(optimizer: OptimizerConfig, steps: int) -> Callable[[Any], jax.Array]:
    """Returns the learning rate as a function of the step: 0, 1, ..., steps - 1.

    Warm-up: lr (step + 1) / warmup_steps. So the first step already has a rate above 0, and step warmup_steps - 1 has
    the full lr. After it, "constant" stays at lr. The other schedules use the progress p = (step - warmup_steps) /
    (steps - warmup_steps) in [0, 1]. They go from lr at p = 0 to final_lr_ratio lr at p = 1, along a line or half a
    cosine (SGDR, arXiv 1608.03983, equation 5).

    Raises:
      ValueError: the warm-up is longer than the run.
    """
    warmup, floor = optimizer.warmup_steps, optimizer.final_lr_ratio
    if warmup > steps:
        raise ValueError(
            f"optimizer.warmup_steps={warmup} is above the run's steps={steps}; the nearest valid value is {steps}"
        )
    shape = SCHEDULES[optimizer.schedule]

    def at(step):
        progress = jnp.clip((step - warmup) / max(1, steps - warmup), 0.0, 1.0)
        return optimizer.lr * jnp.where(step < warmup, (step + 1) / max(1, warmup), shape(progress, floor))

    return at


SCHEDULES = {
    "constant": lambda progress, floor: jnp.ones_like(progress),
    "linear": lambda progress, floor: 1.0 - (1.0 - floor) * progress,
    "cosine": lambda progress, floor: floor + (1.0 - floor) * (1.0 + jnp.cos(jnp.pi * progress)) / 2,
}


def clipping(optimizer: OptimizerConfig) -> Callable[[Any, Any], Any]:
    """Returns a function from a gradient and its global norm to the gradient, clipped to that norm.

    optax.clip_by_global_norm computes the norm itself, by a reduction for each leaf of each layer.
    """
    most = optimizer.max_grad_norm

    def clip(grads, norm):
        return jax.tree.map(lambda g: jnp.where(norm < most, g, g / norm * most), grads)

    return clip if most > 0 else lambda grads, norm: grads


def transform(optimizer: OptimizerConfig, decayed: Any) -> optax.GradientTransformation:
    """Returns a transformation from clipped gradient to step direction, which is to be multiplied by -rate.

    It applies Adam and decoupled weight decay (AdamW, arXiv 1711.05101, algorithm 2).

    `decayed`: a tree of bool like the params (see `matrices`).
    """
    parts = [optax.identity()] if optimizer.max_grad_norm > 0 else []  # the place of clipping in saved states
    adam = optax.scale_by_adam(b1=optimizer.b1, b2=optimizer.b2, eps=optimizer.eps)
    parts.append(adam if optimizer.moments_dtype == "float32" else _kept_in(adam, jnp.dtype(optimizer.moments_dtype)))
    if optimizer.weight_decay > 0:
        parts.append(optax.add_decayed_weights(optimizer.weight_decay, mask=decayed))
    return optax.chain(*parts)


def _kept_in(inner: optax.GradientTransformation, dtype: Any) -> optax.GradientTransformation:
    """Returns `inner` with its floating state kept in `dtype`. It computes in float32 or wider, and rounds at the end."""

    def cast(state, to):
        return jax.tree.map(lambda x: x.astype(to(x.dtype)) if jnp.issubdtype(x.dtype, jnp.floating) else x, state)

    def init(params):
        return cast(inner.init(params), lambda _: dtype)

    def update(grads, state, params=None):
        wide = cast(state, lambda own: jnp.promote_types(own, jnp.float32))
        steps, state = inner.update(grads, wide, params)
        return steps, cast(state, lambda _: dtype)

    return optax.GradientTransformation(init, update)


def matrices(axes: Mapping) -> Any:
    """Returns True for each weight that decays: it has an `embed` axis and another axis.

    Norms are vectors. A bias also counts as a vector, even where it is stored per head as [N, H].

    `axes`: nested dict, each leaf a tuple of logical axis names.
    """
    return jax.tree.map(lambda names: len(names) > 1 and "embed" in names, axes, is_leaf=lambda n: isinstance(n, tuple))
