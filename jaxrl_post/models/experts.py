"""The experts of a layer: which of them each row uses, and the sum of what they compute.

Rows are sorted by expert, go through three grouped products and are put back. Nothing is dropped, and shapes are fixed.

Invariant: a row's experts and their sum depend on that row alone. Of equal scores the lower number wins. The sum over a
row's experts runs by rank, from the highest score to the lowest.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jaxrl_post.models.model_config import ACTIVATIONS, Experts

ALPHA = 1.702  # of the sigmoid behind `Experts.limit`


class Routing(NamedTuple):
    """How the rows of a program come to their experts.

    - choose: (layer, scores f32[..., E], per_token, cache) -> (int32[..., k], cache). The cache is that of `attend`.
    - spread: (run, axes) -> a function like `run`, which is `mixed` of a layer, that each device runs on its own part of
      the rows and the matrices. axes: the logical axis names of each matrix.
    """

    choose: Callable
    spread: Callable


def highest(
    layer: Any, scores: Float[Array, "*rows E"], per_token: int, cache: Any
) -> tuple[Int[Array, "*rows k"], Any]:
    """Returns the experts with the highest scores, highest first. Of equal scores the lower number comes first."""
    return jax.lax.top_k(scores, per_token)[1], cache


ALONE = Routing(highest, lambda run, axes: run)


def gates(scores: Float[Array, "*rows E"], ids: Int[Array, "*rows k"], experts: Experts) -> Float[Array, "*rows k"]:
    """Returns the weight of each chosen expert, float32 or wider."""
    picked = jnp.take_along_axis(scores, ids, axis=-1)
    over = picked if experts.renormalised else scores
    return jnp.exp(picked - jax.nn.logsumexp(over, axis=-1, keepdims=True))


def mixed(
    x: Float[Array, "*rows D"],
    ids: Int[Array, "*rows k"],
    weight: Float[Array, "*rows k"],
    matrices: Mapping[str, Array],
    experts: Experts,
    activation: str,
) -> Float[Array, "*rows D"]:
    """Returns the weighted sum of each row's experts, in float32 or wider.

    matrices: gate and up [E, D, F], down [E, F, D], and gate_bias and up_bias [E, F] where the experts have biases.
    """
    k, expert = ids.shape[-1], ids.reshape(-1)
    order = jnp.argsort(expert, stable=True)
    rows, sorted_experts = x.reshape(-1, x.shape[-1])[order // k], expert[order]
    sizes = jnp.bincount(expert, length=matrices["down"].shape[0]).astype(jnp.int32)

    def product(rows: Array, name: str) -> Array:
        out = jax.lax.ragged_dot(rows, matrices[name].astype(x.dtype), sizes)
        bias = matrices.get(f"{name}_bias")
        return out if bias is None else out + bias.astype(x.dtype)[sorted_experts]

    made = product(inner(product(rows, "gate"), product(rows, "up"), experts.limit, activation), "down")
    back = jnp.zeros_like(order).at[order].set(jnp.arange(expert.size, dtype=order.dtype))
    by_rank = weight[..., None] * made[back].reshape(*ids.shape, -1).astype(weight.dtype)
    return functools.reduce(operator.add, (by_rank[..., rank, :] for rank in range(k)))


def inner(gate: Array, up: Array, limit: float | None, activation: str) -> Array:
    """Returns what goes into the last product of a gated feed-forward."""
    if limit is None:
        return ACTIVATIONS[activation](gate) * up
    gate, up = jnp.minimum(gate, limit), jnp.clip(up, -limit, limit)
    return (up + 1) * gate * jax.nn.sigmoid(ALPHA * gate)
