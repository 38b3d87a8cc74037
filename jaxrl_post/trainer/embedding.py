"""The embedding in training: the sums of its gradient on GPUs and TPUs, and noise on it.

On a GPU XLA adds the gradients of equal tokens with atomic operations, in the order in which they happen to come. Sums then
differ in their last bits from run to run. Here gradients are sorted by token, and those of one token are added in pairs.

On TPUs XLA sorts all tokens of a batch at once, with their places beside them. Its compiler writes much code for that.
Here each piece of the batch is sorted alone, by one number that holds token and place. CPUs and a TPU alone keep XLA's sums.

Invariant: the order of each sum depends on the tokens alone, and no two threads add to one place.

NEFTune (arXiv 2310.05914) is uniform noise on the embeddings of texts that are learnt from. Invariant: the noise of a token
is a function of (rollout, optimizer step, position) alone. A rollout's id holds the run's seed. So the packing does not
matter, and a resumed run draws the same noise.
"""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from jaxtyping import Array, Float, Int, UInt32

from jaxrl_post.kernels import threefry
from jaxrl_post.parallel import mesh as meshes
from jaxrl_post.ring.types import Rollout, RolloutId
from jaxrl_post.trainer.packing import Batch, RolloutSpan

PIECE = 4096  # tokens that a TPU sorts at once, a power of two


def for_platform(mesh: Mesh) -> Callable | None:
    """Returns the rows for the devices of a mesh, or None: the decoder's own rows. A TPU alone would need more memory."""
    sums = {"gpu": in_pairs, "cuda": in_pairs, "tpu": in_pieces if mesh.size > 1 else None}
    found = sums.get(mesh.devices.flat[0].platform)
    return None if found is None else in_order(mesh, found)


def in_order(mesh: Mesh, sums: Callable) -> Callable:
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


def key(id: RolloutId, step: int) -> np.ndarray:
    """Returns uint32[2], the key of a rollout's noise at an optimizer step."""
    text = b"neftune" + id.seed().tobytes() + step.to_bytes(8, "little")
    return np.frombuffer(hashlib.blake2b(text, digest_size=8).digest(), "<u4").astype(np.uint32)


@dataclasses.dataclass(frozen=True)
class Noise:
    """Noise of a run. `alpha` 0: none. `width`: of an embedding. `dtype`: of a batch's floating leaves."""

    alpha: float
    width: int
    dtype: Any

    def added(
        self, batches: Sequence[Batch], places: Sequence[RolloutSpan], rollouts: Sequence[Rollout], step: int
    ) -> list[Batch]:
        """Returns packed batches with the leaves of noise, which are 0 without rollouts; in a run without it, as they are.

        A number of a text of L tokens, prompt and rollout together, gets at most alpha / sqrt(L d).

        `rollouts`: in the order of `places`, or none.
        """
        if self.alpha == 0:
            return list(batches)
        out = [silent(batch, self.dtype) for batch in batches]
        for place, rollout in zip(places, rollouts, strict=bool(rollouts)):
            begin, end = place.start - rollout.prompt.tokens.size, place.start + place.length
            out[place.batch].noise_keys[place.row, begin:end] = key(rollout.id, step)
            out[place.batch].noise_scales[place.row, begin:end] = self.alpha / ((end - begin) * self.width) ** 0.5
        return out


def silent(batch: Batch, dtype: Any) -> Batch:
    """Returns a batch with the leaves of noise, all 0."""
    shape = batch.tokens.shape
    return dataclasses.replace(batch, noise_keys=np.zeros((*shape, 2), np.uint32), noise_scales=np.zeros(shape, dtype))


def noise(
    keys: UInt32[Array, "B T 2"], positions: Int[Array, "B T"], scales: Float[Array, "B T"], width: int
) -> Float[Array, "B T D"]:
    """Returns numbers from -scale to scale, in the dtype of `scales`.

    The counter of a number is (position, dimension), and the 23 upper bits of its word count.
    """
    counter = positions[..., None].astype(jnp.uint32), jnp.arange(width, dtype=jnp.uint32)
    bits = threefry.first_word(jnp, keys[..., :1], keys[..., 1:], *counter)
    unit = ((bits >> 9).astype(scales.dtype) + 0.5) * 2.0**-23
    return scales[..., None] * (2 * unit - 1)
