"""The experts of a layer: which of them each row uses, and the sum of what they compute.

Rows are sorted by expert, go through three grouped products and are put back. Nothing is dropped, and shapes are fixed.

Invariant: a row's experts and their sum depend on that row alone. Of equal scores the lower number wins. The sum over a
row's experts runs by rank, from the highest score to the lowest.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jaxrl_post.models.model_config import ACTIVATIONS, Experts, ModelConfig

ALPHA = 1.702  # of the sigmoid behind `Experts.limit`


def ragged_product(rows: Float[Array, "M K"], matrices: Array, sizes: Int[Array, " E"]) -> Float[Array, "M N"]:
    """Returns jax.lax.ragged_dot in the dtype of the rows. matrices [E, K, N] may be codes."""
    return jax.lax.ragged_dot(rows, matrices.astype(rows.dtype), sizes)


class Routing(NamedTuple):
    """How the rows of a program come to their experts.

    - choose: (layer, scores f32[..., E], per_token, cache) -> (int32[..., k], cache). The cache is that of `attend`.
    - spread: (run, axes) -> a function like `run`, which is `mixed` of a layer, that each device runs on its own part of
      the rows and the matrices. axes: the logical axis names of each matrix.
    - multiply: (rows sorted by expert, matrices, rows of each expert) -> products, as `ragged_product`.
    """

    choose: Callable
    spread: Callable
    multiply: Callable = ragged_product


def highest(
    layer: Any, scores: Float[Array, "*rows E"], per_token: int, cache: Any
) -> tuple[Int[Array, "*rows k"], Any]:
    """Returns the experts with the highest scores, highest first. Of equal scores the lower number comes first.

    One maximum after another. XLA's top-k is not divided over rows: each device would get the scores of all.
    """
    ids, left = [], scores
    for _ in range(per_token):
        ids.append(jnp.argmax(left, axis=-1).astype(jnp.int32))
        left = jnp.where(jnp.arange(scores.shape[-1]) == ids[-1][..., None], -jnp.inf, left)
    return jnp.stack(ids, axis=-1), cache


ALONE = Routing(highest, lambda run, axes: run)


# ---- routes: the experts of a token in every layer, as they are recorded


def route_words(config: ModelConfig) -> int:
    """Returns the int32 words of a token's route: one byte an expert up to 255 of them, else two. 0 without experts."""
    return 0 if config.experts is None else -(-_chosen(config) * _size(config.experts) // 4)


def _chosen(config: ModelConfig) -> int:
    e = config.experts
    return 0 if e is None else len(config.expert_layers) * e.per_token


def _size(experts: Experts) -> int:
    """Returns the bytes of an expert. All bits of a word set mean that there is no route."""
    return 1 if experts.count < 256 else 2


def packed(routes: Sequence[Int[Array, "*rows k"]], config: ModelConfig) -> Int[Array, "*rows words"]:
    """Returns the chosen experts of all layers, one after another, as words. The first expert has the lowest bits."""
    assert config.experts is not None
    size, words = _size(config.experts), route_words(config)
    ids = jnp.concatenate(routes, axis=-1)
    ids = jnp.pad(ids, [(0, 0)] * (ids.ndim - 1) + [(0, words * 4 // size - ids.shape[-1])])
    parts = ids.reshape(*ids.shape[:-1], words, 4 // size).astype(jnp.uint32)
    shifts = 8 * size * jnp.arange(4 // size, dtype=jnp.uint32)
    return jax.lax.bitcast_convert_type(jnp.sum(parts << shifts, axis=-1, dtype=jnp.uint32), jnp.int32)


def unpacked(words: Int[Array, "*rows words"], config: ModelConfig) -> Int[Array, "layers *rows k"]:
    """Returns the experts of each layer that has some, or -1 for a token without a route."""
    e = config.experts
    assert e is not None
    size = _size(e)
    shifts = 8 * size * jnp.arange(4 // size, dtype=jnp.uint32)
    parts = jax.lax.bitcast_convert_type(words, jnp.uint32)[..., None] >> shifts & ((1 << 8 * size) - 1)
    ids = parts.reshape(*words.shape[:-1], -1)[..., : _chosen(config)].astype(jnp.int32)
    ids = jnp.where(jnp.all(words == -1, axis=-1, keepdims=True), -1, ids)
    return jnp.moveaxis(ids.reshape(*words.shape[:-1], -1, e.per_token), -2, 0)


def gates(scores: Float[Array, "*rows E"], ids: Int[Array, "*rows k"], experts: Experts) -> Float[Array, "*rows k"]:
    """Returns the weight of each chosen expert, float32 or wider."""
    picked = taken(scores[..., None, :], ids)
    over = picked if experts.renormalised else scores
    return jnp.exp(picked - jax.nn.logsumexp(over, axis=-1, keepdims=True))


def taken(values: Float[Array, "... E"], ids: Int[Array, "*rows k"]) -> Float[Array, "*rows k"]:
    """Returns the values [..., 1, E] of the chosen experts. Ids are compared, because the gradient of a look-up is a scatter."""
    return jnp.sum(jnp.where(ids[..., None] == jnp.arange(values.shape[-1]), values, 0), axis=-1)


def mixed(
    x: Float[Array, "*rows D"],
    ids: Int[Array, "*rows k"],
    weight: Float[Array, "*rows k"],
    matrices: Mapping[str, Array],
    experts: Experts,
    activation: str,
    lora_scale: float = 0.0,
    multiply: Callable = ragged_product,
) -> Float[Array, "*rows D"]:
    """Returns the weighted sum of each row's experts, in float32 or wider.

    Where F is split over devices, each has a part of the sum over F, and these parts add up. A low product of `down` is such
    a part too, and what B makes of it is linear. Where there are matrices of some experts only, others add nothing. Their
    rows come last, behind all groups, so that shapes do not depend on how many there are.

    Args:
      ids: from 0 to below E; others are of experts without matrices.
      matrices: gate and up [E, D, F], down [E, F, D], and gate_bias and up_bias [E, F] where the experts have biases. A
        matrix [E, inputs, outputs] may have a low-rank addition: NAME_a [E, inputs, r] and NAME_b [E, r, outputs]. Or it is
        codes of 8 bits, with NAME_scale [E, outputs].
      lora_scale: factor of A B.
      multiply: as in `Routing`.
    """
    k, expert, count = ids.shape[-1], ids.reshape(-1), matrices["down"].shape[0]
    some = count < experts.count
    if some:
        here = (ids >= 0) & (ids < count)
        expert, weight = jnp.where(here, ids, count).reshape(-1), jnp.where(here, weight, 0)
    order, sorted_experts = by_expert(expert, count)
    back = jnp.zeros_like(order).at[order].set(jnp.arange(expert.size, dtype=order.dtype), unique_indices=True)
    rows = _sorted(x.reshape(-1, x.shape[-1]), order, back)
    places = jnp.minimum(sorted_experts, count - 1) if some else sorted_experts
    sizes = jnp.bincount(expert, length=count).astype(jnp.int32)

    def known(rows: Array) -> Array:
        """Returns zeros for rows behind all groups. What a grouped product makes of them, and of their slopes, is not defined."""
        return jnp.where((sorted_experts < count)[:, None], rows, 0) if some else rows

    def grouped(rows: Array, name: str) -> Array:
        matrix, scale = matrices[name], matrices.get(f"{name}_scale")
        if scale is None:
            return multiply(rows, matrix.astype(x.dtype), sizes)
        return (multiply(rows, matrix, sizes).astype(scale.dtype) * scale[places]).astype(x.dtype)

    def product(rows: Array, name: str) -> Array:
        rows = known(rows)
        out = grouped(rows, name)
        if f"{name}_a" in matrices:
            with jax.named_scope("lora"):
                low = known(grouped(rows, f"{name}_a"))
                out = out + jnp.asarray(lora_scale, x.dtype) * grouped(low, f"{name}_b")
        bias = matrices.get(f"{name}_bias")
        return known(out if bias is None else out + bias.astype(x.dtype)[places])

    made = product(inner(product(rows, "gate"), product(rows, "up"), experts.limit, activation), "down")
    by_rank = weight[..., None] * _put_back(made, order, back).reshape(*ids.shape, -1).astype(weight.dtype)
    return _sum_by_rank(by_rank, k)


def by_expert(expert: Int[Array, " N"], count: int) -> tuple[Int[Array, " N"], Int[Array, " N"]]:
    """Returns the numbers of rows sorted by expert, of equal experts by number, and the experts in this order.

    expert: from 0 to `count`. Where 32 bits suffice, a key holds both. A sort of one array compiles in fewer seconds.
    """
    bits, places = max(expert.size - 1, 1).bit_length(), jnp.arange(expert.size, dtype=jnp.int32)
    if (count + 1) << bits > 1 << 32:
        order = jnp.argsort(expert, stable=True)
        return order, expert[order]
    keys = jax.lax.sort(expert.astype(jnp.uint32) << bits | places.astype(jnp.uint32), is_stable=False)
    return (keys & ((1 << bits) - 1)).astype(jnp.int32), (keys >> bits).astype(jnp.int32)


@jax.custom_vjp
def _sorted(x: Float[Array, "T D"], order: Int[Array, " N"], back: Int[Array, " N"]) -> Float[Array, "N D"]:
    """Returns a row for each expert that it uses, in `order`. N is k T.

    The gradient adds a row's k slopes by rank. XLA's own gradient would scatter them one after another.
    """
    return x[order // (order.size // x.shape[0])]


def _slope_of_sorted(of: tuple[Array, Array], slope: Array) -> tuple[Array, None, None]:
    rows, back = of
    k, wide = back.size // rows.shape[0], jnp.promote_types(slope.dtype, jnp.float32)
    return _sum_by_rank(slope[back].reshape(-1, k, slope.shape[-1]).astype(wide), k).astype(slope.dtype), None, None


_sorted.defvjp(lambda x, order, back: (_sorted(x, order, back), (x[:, :0], back)), _slope_of_sorted)


@jax.custom_vjp
def _put_back(rows: Float[Array, "N D"], order: Int[Array, " N"], back: Int[Array, " N"]) -> Float[Array, "N D"]:
    """Returns sorted rows in their first order. The gradient sorts the slopes."""
    return rows[back]


_put_back.defvjp(
    lambda rows, order, back: (_put_back(rows, order, back), order), lambda order, slope: (slope[order], None, None)
)


def _sum_by_rank(parts: Float[Array, "*rows k D"], k: int) -> Float[Array, "*rows D"]:
    return functools.reduce(operator.add, (parts[..., rank, :] for rank in range(k)))


def inner(gate: Array, up: Array, limit: float | None, activation: str) -> Array:
    """Returns what goes into the last product of a gated feed-forward."""
    if limit is None:
        return ACTIVATIONS[activation](gate) * up
    gate, up = jnp.minimum(gate, limit), jnp.clip(up, -limit, limit)
    return (up + 1) * gate * jax.nn.sigmoid(ALPHA * gate)
