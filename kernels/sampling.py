"""Sampling law 1: the token that a row samples, from logits, a seed, a position, a temperature and a threshold.

The law never changes; another law gets another number.
  1. noise(seed, position, word) is the first output word of threefry-2x32 with key = seed and counter = (position,
    word).
     u = ((bits >> 1) + 0.5) * 2^-31 in float32, at most 1 - 2^-24 (where rounding would give 1). E = -log1p(-u), by a
     series below 0.01. G = -log E is a standard Gumbel number, always finite.
  2. Token ids are cut into tiles of 1024. The score of a tile is the log-sum-exp of logits/temperature over its allowed
     ids, plus G with word = 2^31 + tile. The tile with the highest score wins.
  3. Inside that tile, the id with the highest logits/temperature + G wins, with word = id. Ties go to the lowest id.
  4. Temperature 0 is argmax without noise.
  5. Ids whose logit is below the row's threshold (top-k, top-p: kernels/thresholds.py) are not allowed. Noise and tiles
     stay the same. All ids that tie with the threshold are allowed.
By the Gumbel-max theorem, applied twice, the id follows softmax(logits/temperature) exactly. The tag 2^31 separates the
noise of tile t from that of id t. Without it, ids 0 and 1 have twice and zero times their probability.

Invariant: a row's result depends on that row's inputs alone, to the bit. So logits are compared with a threshold even where
no row has one: XLA:CPU rounds logits that are only divided in another way. Log-probs and entropies are those of the law, with
temperature and threshold; at temperature 0 they are those of temperature 1. The kernels with this signature are tested
against it.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, UInt32

from jaxrl_post.kernels import threefry

LAW = 1
TILE = 1024
TILE_TAG = 1 << 31


# Two words a row. A kernel, which has no slices, gives them as two columns.
Seeds = UInt32[Array, "R 2"] | tuple[UInt32[Array, "R 1"], UInt32[Array, "R 1"]]


class Drawn(NamedTuple):
    """The samples of R rows.

    `logprobs` and `entropies` (nats) are those of the law. `plain` is the token's log-prob at temperature 1 over every
    id that is not -inf. `argmax_tokens`: the lowest id with the highest logit."""

    tokens: Int[Array, " R"]
    logprobs: Float[Array, " R"]
    entropies: Float[Array, " R"]
    plain: Float[Array, " R"]
    argmax_tokens: Int[Array, " R"]


def gumbel(seeds: Seeds, positions: Int[Array, " R"], words: UInt32[Array, "R W"]) -> Float[Array, "R W"]:
    """Returns standard Gumbel numbers, float32, one for each row and word."""
    keys = seeds if isinstance(seeds, tuple) else (seeds[:, :1], seeds[:, 1:])
    bits = threefry.first_word(jnp, *keys, positions[:, None].astype(jnp.uint32), words)
    u = jnp.minimum(((bits >> 1).astype(jnp.float32) + 0.5) * (2.0**-31), 1.0 - 2.0**-24)
    series = u * (1 + u * (1 / 2 + u * (1 / 3 + u * (1 / 4))))
    return -jnp.log(jnp.where(u < 0.01, series, -jnp.log1p(-u)))


def first_highest(scores: Float[Array, "R W"]) -> Int[Array, " R"]:
    """Returns the lowest id with the highest score: argmax as two plain reductions.

    XLA:CPU computes argmax, and the noise fused into it, one number at a time."""
    width = scores.shape[-1]
    highest = scores == jnp.max(scores, axis=-1, keepdims=True)
    return jnp.min(jnp.where(highest, jnp.arange(width, dtype=jnp.int32), width - 1), axis=-1)


def _replaced(tokens: Int[Array, " R"], given: Int[Array, " R"] | None) -> Int[Array, " R"]:
    """Returns the given ids, where there are any, and the samples elsewhere."""
    return tokens if given is None else jnp.where(given < 0, tokens, given)


def sample(
    logits: Float[Array, "R V"],
    seeds: UInt32[Array, "R 2"],
    positions: Int[Array, " R"],
    temperatures: Float[Array, " R"],
    thresholds: Float[Array, " R"] | None = None,
    given: Int[Array, " R"] | None = None,
) -> Drawn:
    """Samples one token a row.

    `positions`: absolute position of the sampled token, prompt included. Logits are float32; -inf marks an id that is
    not allowed. `thresholds`: ids with a lower logit are not allowed. -inf, or None for all rows: none. `given`: ids that
    stand for the samples of their rows, so that their log-probs are returned; -1 samples. An id that is not allowed has
    log-prob -inf."""
    rows, vocab = logits.shape
    greedy = temperatures == 0
    scaled = logits / jnp.where(greedy, 1.0, temperatures)[:, None]
    lowest = jnp.full(rows, -jnp.inf, logits.dtype) if thresholds is None else thresholds
    scaled = jnp.where(logits >= lowest[:, None], scaled, -jnp.inf)
    width = min(TILE, vocab)
    tiles = -(-vocab // width)
    tiled = jnp.pad(scaled, ((0, 0), (0, tiles * width - vocab)), constant_values=-jnp.inf).reshape(rows, tiles, width)

    with jax.named_scope("law"):
        peak = jnp.max(tiled, axis=-1)
        weight = jnp.exp(tiled - jnp.where(peak > -jnp.inf, peak, 0.0)[..., None])
        mass = jnp.sum(weight, axis=-1)
        lse_tile = jnp.where(mass > 0, peak + jnp.log(jnp.where(mass > 0, mass, 1.0)), -jnp.inf)
        top = jnp.max(peak, axis=-1)
        share = jnp.where(mass > 0, jnp.exp(jnp.where(mass > 0, peak, top[:, None]) - top[:, None]), 0.0)
        total = jnp.sum(share * mass, axis=-1)
        lse = top + jnp.log(total)
        moment = jnp.sum(jnp.where(weight > 0, weight * jnp.where(weight > 0, tiled, 0.0), 0.0), axis=-1)
        entropies = lse - jnp.sum(share * moment, axis=-1) / total

    with jax.named_scope("noise"):
        if tiles == 1:
            best = jnp.zeros(rows, jnp.int32)
            inside = tiled[:, 0]
        else:
            words = jnp.broadcast_to(jnp.arange(tiles, dtype=jnp.uint32) + jnp.uint32(TILE_TAG), (rows, tiles))
            noisy = lse_tile + gumbel(seeds, positions, words)
            best = jnp.argmax(jnp.where(greedy[:, None], peak, noisy), axis=-1).astype(jnp.int32)
            inside = jnp.take_along_axis(tiled, best[:, None, None], axis=1)[:, 0]
        ids = best[:, None] * width + jnp.arange(width, dtype=jnp.int32)
        noisy = inside + jnp.where(greedy[:, None], 0.0, gumbel(seeds, positions, ids.astype(jnp.uint32)))
        tokens = _replaced((best * width + first_highest(noisy)).astype(jnp.int32), given)

    chosen, plain = (jnp.take_along_axis(x, tokens[:, None], axis=-1)[:, 0] for x in (scaled, logits))
    return Drawn(tokens, chosen - lse, entropies, plain - jax.nn.logsumexp(logits, axis=-1), first_highest(logits))
