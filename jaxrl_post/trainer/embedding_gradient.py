"""Rows of the embedding whose gradient has sums of our own, on GPUs and TPUs.

On a GPU XLA adds the gradients of equal tokens with atomic operations, in the order in which they happen to come. Sums then
differ in their last bits from run to run. Here gradients are sorted by token, and those of one token are added in pairs.

On TPUs XLA sorts all tokens of a batch at once, with their places beside them. Its compiler writes much code for that.
Here each piece of the batch is sorted alone, by one number that holds token and place. CPUs and a TPU alone keep XLA's sums.

Invariant: the order of each sum depends on the tokens alone, and no two threads add to one place.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jaxrl_post.parallel import mesh as meshes

PIECE = 4096  # tokens that a TPU sorts at once, a power of two


def for_platform(mesh: jax.sharding.Mesh) -> Callable | None:
    """Returns the rows for the devices of a mesh, or None: the decoder's own rows. A TPU alone would need more memory."""
    sums = {"gpu": in_pairs, "cuda": in_pairs, "tpu": in_pieces if mesh.size > 1 else None}
    found = sums.get(mesh.devices.flat[0].platform)
    return None if found is None else in_order(mesh, found)


def in_order(mesh: jax.sharding.Mesh, sums: Callable) -> Callable:
    """Returns `rows(table [V, D], tokens [N], dtype)`: `table[tokens]` as `dtype`, whose gradient `sums` adds up.

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


def in_pairs(tokens: Int[Array, " N"], slopes: Float[Array, "N D"], vocab: int) -> Float[Array, "V D"]:
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


def in_pieces(tokens: Int[Array, " N"], slopes: Float[Array, "N D"], vocab: int) -> Float[Array, "V D"]:
    """Returns the same sums as `in_pairs`, one piece of the tokens after another. Tokens are below `vocab`."""
    size = min(PIECE, 1 << (tokens.size - 1).bit_length(), 1 << (31 - vocab.bit_length()))  # a key has 31 bits
    pieces, places, bits = -(-tokens.size // size), jnp.arange(size, dtype=tokens.dtype), (size - 1).bit_length()
    spare = pieces * size - tokens.size
    tokens = jnp.pad(tokens, (0, spare), constant_values=vocab).reshape(pieces, size)  # `vocab` is dropped
    slopes = jnp.pad(slopes, ((0, spare), (0, 0))).reshape(pieces, size, -1)

    def add(piece, added):
        keys = jax.lax.sort((tokens[piece] << bits) | places, is_stable=False)
        mine = slopes[piece][keys & (size - 1)]
        return added.at[keys >> bits].add(mine, mode="drop", indices_are_sorted=True)

    return jax.lax.fori_loop(0, pieces, add, jnp.zeros((vocab, slopes.shape[-1]), slopes.dtype))
