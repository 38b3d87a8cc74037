"""Device programs of a client's training: log-probs, gradient sums, and Adam's step. Pure functions of their arguments.

Datums of a request are packed into micro-batches of one static shape. Everything is indexed at the input token; the target
at [b, t] is what stands behind the input at [b, t].

Invariant: all clients whose weights have one form share the programs, and no program takes the weights of two clients. A
gradient is a plain sum over tokens: nothing divides it. Where a datum lies is a function of the lengths of its own request
alone. So what other clients train changes no bit of it.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from jaxrl_post.models import lora
from jaxrl_post.parallel import mesh as meshes
from jaxrl_post.serve.tinker.losses import LOSSES, Bounds
from jaxrl_post.trainer import compiled_programs, packing
from jaxrl_post.trainer import programs as learning
from jaxrl_post.trainer.programs import Recipe


@dataclass(frozen=True, kw_only=True)
class Datum:
    """Inputs and targets of one sequence, int32[N] each, and what the losses read, float32[N] each.

    Tensors that the loss does not read are zeros.
    """

    tokens: np.ndarray
    targets: np.ndarray
    weights: np.ndarray
    advantages: np.ndarray
    logprobs: np.ndarray

    def __len__(self) -> int:
        return self.tokens.size


class Micro(NamedTuple):
    """A micro-batch. `targets`: int32[rows, tokens]."""

    batch: packing.Batch
    targets: Any


class DatumSpan(NamedTuple):
    """Where a datum lies: its numbers are at [micro][row, start : start + length]."""

    micro: int
    row: int
    start: int
    length: int


def pack(datums: Sequence[Datum], rows: int, tokens: int) -> tuple[list[Micro], list[DatumSpan]]:
    """Returns micro-batches [rows, tokens] that hold every datum whole, and the places in the order of the datums.

    No datum may be longer than `tokens`.
    """
    row, start, used = packing.place(np.array([len(one) for one in datums], np.int64), tokens)
    blank = packing.blank(-(-used // rows) * rows, tokens, np.float32)
    targets, segments = np.zeros_like(blank.tokens), np.zeros(len(blank.tokens), np.int32)
    for index in np.lexsort((start, row)):  # along each row, so that segments are numbered from left to right
        one, r = datums[index], row[index]
        segments[r] += 1
        at = r, slice(start[index], start[index] + len(one))
        blank.tokens[at], targets[at] = one.tokens, one.targets
        blank.positions[at], blank.segment_ids[at] = np.arange(len(one)), segments[r]
        blank.loss_mask[at], blank.loss_weights[at] = True, one.weights
        blank.advantages[at], blank.rollout_logprobs[at] = one.advantages, one.logprobs
    leaves = {name: leaf for name, leaf in _leaves(blank).items() if leaf is not None}
    cuts = [slice(at, at + rows) for at in range(0, len(blank.tokens), rows)]
    micros = [Micro(packing.Batch(**{name: leaf[cut] for name, leaf in leaves.items()}), targets[cut]) for cut in cuts]
    places = [DatumSpan(int(r) // rows, int(r) % rows, int(s), len(one)) for r, s, one in zip(row, start, datums)]
    return micros, places


def unpacked(arrays: Sequence[np.ndarray], places: Sequence[DatumSpan]) -> list[np.ndarray]:
    """Cuts the [rows, tokens] results of each micro-batch into one vector for each datum."""
    return [np.array(arrays[p.micro][p.row, p.start : p.start + p.length]) for p in places]


def _leaves(batch: packing.Batch) -> dict[str, np.ndarray | None]:
    return {one.name: getattr(batch, one.name) for one in dataclasses.fields(batch)}


class Moments(NamedTuple):
    """Adam's means of the gradient and of its square, trees like the trained weights."""

    first: Any
    second: Any


def adam_scalars(
    step: int,
    *,
    learning_rate: float,
    beta1: float,
    beta2: float,
    eps: float,
    weight_decay: float,
    grad_clip_norm: float,
) -> dict[str, np.float32]:
    """Returns the arguments of `stepped`. `step`: from 1. `grad_clip_norm`: largest norm of the gradient; 0: any."""
    given = dict(rate=learning_rate, beta1=beta1, beta2=beta2, eps=eps, decay=weight_decay)
    given["most"] = grad_clip_norm or np.inf
    given["rest1"], given["rest2"] = 1.0 - beta1, 1.0 - beta2  # float32 would lose digits of these
    given["unbias1"], given["unbias2"] = 1.0 - beta1**step, 1.0 - beta2**step
    return {name: np.float32(value) for name, value in given.items()}


def logprobs(policy: Any, micro: Micro, recipe: Recipe) -> Float[Array, "B T"]:
    """Returns the log-prob of the target at every token, in nats. Padding has a value without a meaning."""
    policy = lora.whole(policy)
    h = learning.hidden(policy, recipe.model, micro.batch, recipe)
    return learning.logprobs_and_entropy(policy, h, micro.targets, recipe)[0]


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
