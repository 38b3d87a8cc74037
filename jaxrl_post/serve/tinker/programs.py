"""Device programs of a client's training: log-probs, gradient sums, and Adam's step. Pure functions of their arguments.

Invariant: all clients whose weights have one form share the programs, and no program takes the weights of two clients. A
gradient is a plain sum over tokens: nothing divides it.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from jaxrl_post.models import lora
from jaxrl_post.parallel import mesh as meshes
from jaxrl_post.serve.tinker.datums import Micro
from jaxrl_post.serve.tinker.losses import LOSSES, Bounds
from jaxrl_post.trainer import compiled_programs
from jaxrl_post.trainer import programs as learning
from jaxrl_post.trainer.programs import Recipe


class Moments(NamedTuple):
    """Adam's means of the gradient and of its square, trees like the trained weights."""

    first: Any
    second: Any


@dataclass(frozen=True, kw_only=True)
class Adam:
    """The numbers of one optimizer step. `clip`: largest norm of the gradient; 0: any."""

    rate: float
    beta1: float
    beta2: float
    eps: float
    decay: float
    clip: float

    def scalars(self, step: int) -> dict[str, np.float32]:
        """Returns the arguments of `stepped`. `step`: from 1."""
        given = dict(rate=self.rate, beta1=self.beta1, beta2=self.beta2, eps=self.eps, decay=self.decay)
        given["most"] = self.clip or np.inf
        given["rest1"], given["rest2"] = 1.0 - self.beta1, 1.0 - self.beta2  # float32 would lose digits of these
        given["unbias1"], given["unbias2"] = 1.0 - self.beta1**step, 1.0 - self.beta2**step
        return {name: np.float32(value) for name, value in given.items()}


def logprobs(policy: Any, micro: Micro, recipe: Recipe) -> Float[Array, "B T"]:
    """Returns the log-prob of the target at every token, in nats. Padding has a value without a meaning."""
    policy = lora.whole(policy)
    h = learning.hidden(policy, recipe.model, micro.batch, recipe)
    return learning.laws(policy, h, micro.targets, recipe)[0]


def forward(policy: Any, micro: Micro, bounds: Bounds, recipe: Recipe, loss: str) -> tuple[Any, Any]:
    """Returns log-probs and losses of every token, [B, T] each. Losses of padding are 0."""
    found = logprobs(policy, micro, recipe)
    return found, jnp.where(micro.batch.loss_mask, LOSSES[loss].of(found, micro.batch, bounds), 0.0)


def accumulate(policy: Any, sums: Any, micro: Micro, bounds: Bounds, recipe: Recipe, loss: str) -> tuple[Any, Any, Any]:
    """Returns `sums` plus the gradient of a micro-batch's summed loss, and what `forward` returns."""

    def total(weights: Any) -> tuple[Any, tuple[Any, Any]]:
        found, losses = forward(lora.with_trained(policy, weights), micro, bounds, recipe, loss)
        return jnp.sum(losses), (found, losses)

    grads, (found, losses) = jax.grad(total, has_aux=True)(lora.trained(policy))
    return learning.plus(sums, learning.in_sums(grads, recipe)), found, losses


def zeros(weights: Any, recipe: Recipe) -> Any:
    """Returns empty sums of these trained weights."""
    return jax.tree.map(jnp.zeros_like, learning.in_sums(weights, recipe))


def stepped(
    weights: Any, moments: Moments, sums: Any, given: Mapping[str, Any], recipe: Recipe
) -> tuple[Any, Moments, Any]:
    """Returns weights and moments after a step of AdamW (arXiv 1711.05101, algorithm 2), and the gradient's norm.

    Where the norm is not finite, weights and moments keep every bit.
    """
    grads = learning.by_layer(sums, recipe)
    norm = jnp.sqrt(sum(jnp.sum(g * g) for g in jax.tree.leaves(grads)))
    scale = jnp.where(norm > given["most"], given["most"] / norm, 1.0)
    beta1, beta2, sound = given["beta1"], given["beta2"], jnp.isfinite(norm)
    first = jax.tree.map(lambda m, g: beta1 * m + given["rest1"] * (scale * g), moments.first, grads)
    second = jax.tree.map(lambda v, g: beta2 * v + given["rest2"] * jnp.square(scale * g), moments.second, grads)

    def moved(p: Any, m: Any, v: Any) -> Any:
        direction = m / given["unbias1"] / (jnp.sqrt(v / given["unbias2"]) + given["eps"])
        return p - given["rate"] * (direction + given["decay"] * p)

    after = jax.tree.map(moved, weights, first, second), Moments(first, second)
    kept = jax.tree.map(lambda new, old: jnp.where(sound, new, old), after, (weights, moments))
    return *kept, norm


class Programs:
    """The jitted programs of one form of weights. Each is compiled at its first call.

    Args:
      homes: shardings of the trained weights.
    """

    def __init__(self, recipe: Recipe, homes: Any):
        one, sums = meshes.replicated(recipe.mesh), compiled_programs.homes(homes, recipe)
        options = compiled_programs.COMPILER.get(recipe.mesh.devices.flat[0].platform)
        self.homes = homes
        self.forward = {
            name: jax.jit(functools.partial(forward, recipe=recipe, loss=name), out_shardings=one) for name in LOSSES
        }
        self.accumulate = {
            name: jax.jit(
                functools.partial(accumulate, recipe=recipe, loss=name),
                donate_argnums=1,
                out_shardings=(sums, one, one),
                compiler_options=options,
            )
            for name in LOSSES
        }
        self.zeros = jax.jit(functools.partial(zeros, recipe=recipe), out_shardings=sums)
        self.step = jax.jit(
            functools.partial(stepped, recipe=recipe),
            donate_argnums=(0, 1),
            out_shardings=(homes, Moments(homes, homes), one),
        )
