"""Rows of the embedding whose gradient is added up in a fixed order.

XLA adds the gradients of equal tokens with atomic operations on a GPU, in the order in which they happen to come. Sums
then differ in their last bits from run to run. Here gradients are sorted by token, and those of one token are added in
pairs. TPUs and CPUs add in a fixed order already.

Invariant: the order of each sum depends on the tokens alone, and no two threads add to one place.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jaxrl_post.parallel import mesh as meshes


def for_platform(mesh: jax.sharding.Mesh) -> Callable | None:
    """Returns `in_order(mesh)` where the devices would add in any order, else None: the decoder's own rows."""
    return in_order(mesh) if mesh.devices.flat[0].platform in ("gpu", "cuda") else None


def in_order(mesh: jax.sharding.Mesh) -> Callable:
    """Returns `rows(table [V, D], tokens [N], dtype)`: `table[tokens]` as `dtype`, whose gradient adds up in order.

    Every device adds up all tokens for its own part of D, so that the vocabulary never crosses devices."""
    axes = {"tokens": (None,), "parts": (None, "embed"), "table": ("vocab", "embed")}
    homes = meshes.param_shardings(mesh, axes, "learner")
    put = jax.lax.with_sharding_constraint

    def rows(table: Float[Array, "V D"], tokens: Int[Array, " N"], dtype: Any) -> Float[Array, "N D"]:
        @jax.custom_vjp
        def look_up(table, tokens):
            return table[tokens].astype(dtype)

        def backward(tokens, slopes):
            slopes = put(slopes, meshes.batch_sharding(mesh))  # so that the sums' sharding does not reach the layers
            slopes = put(put(slopes, meshes.embedded_sharding(mesh)), homes["parts"]).astype(table.dtype)
            return put(sums(put(tokens, homes["tokens"]), slopes, table.shape[0]), homes["table"]), None

        look_up.defvjp(lambda table, tokens: (look_up(table, tokens), tokens), backward)
        return look_up(table, tokens)

    return rows


def sums(tokens: Int[Array, " N"], slopes: Float[Array, "N D"], vocab: int) -> Float[Array, "V D"]:
    """Returns, for each token of the vocabulary, the sum of its slopes.

    Each pass adds what lies 1, 2, 4, ... places before, if it belongs to the same token. So after the last pass the
    last place of a token holds its sum."""
    order = jnp.argsort(tokens)
    tokens, places = tokens[order], jnp.arange(tokens.size)

    def add(turn, added):
        before = places - (1 << turn)
        nearest = jnp.maximum(before, 0)
        same = (before >= 0) & (tokens[nearest] == tokens)
        return added + jnp.where(same[:, None], added[nearest], 0)

    added = jax.lax.fori_loop(0, (tokens.size - 1).bit_length(), add, slopes[order])
    # The other places go to ids of their own behind the vocabulary, and are dropped. They are added to zeros and not set,
    # so that XLA adds to the head's gradient at once where both are one matrix.
    last = jnp.append(tokens[1:] != tokens[:-1], True)
    ids = jnp.where(last, tokens, vocab + places)
    return jnp.zeros((vocab, slopes.shape[1]), slopes.dtype).at[ids].add(added, mode="drop", unique_indices=True)
