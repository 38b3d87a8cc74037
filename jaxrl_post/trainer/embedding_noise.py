"""NEFTune (arXiv 2310.05914): uniform noise on the embeddings of texts that are learnt from.

Invariant: the noise of a token is a function of (rollout, optimizer step, position) alone. A rollout's id holds the run's
seed. So the packing does not matter, and a resumed run draws the same noise.
"""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int, UInt32

from jaxrl_post.kernels import threefry
from jaxrl_post.trainer.packing import Batch, Place
from jaxrl_post.types import Rollout, RolloutId


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
        self, batches: Sequence[Batch], places: Sequence[Place], rollouts: Sequence[Rollout], step: int
    ) -> list[Batch]:
        """Returns packed batches with the leaves of noise, which are 0 without rollouts; in a run without it, as they are.

        A number of a text of L tokens, prompt and rollout together, gets at most alpha / sqrt(L d).

        Args:
          rollouts: in the order of `places`, or none.
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
