"""Sampling law 1 by tiles: what a kernel finds out about each tile of 1024 ids, and how a row is drawn from that.

The vocabulary is read once, by the kernel, which needs no noise: four numbers a tile. The rest touches a thousandth of it:
noise for every tile, then for the ids of the winning tile. A device that holds a part of the vocabulary (whole tiles) draws
among its own ids, and eight numbers a row from each device decide.

Invariant: as of kernels/sampling.py, whose law and noise these are; a row's result depends on that row's inputs alone.
"""

from __future__ import annotations

from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Float, Int, UInt32

from jaxrl_post.kernels import sampling

TILE = sampling.TILE
LOWEST = -1e30  # stands for -inf: its differences are numbers


class Statistics(NamedTuple):
    """Of each tile, float32: `peak`, the highest logit; over all its ids `whole` = sum exp(logit - peak); over those that
    the threshold allows, with z = (logit - peak) / temperature, `mass` = sum exp(z) and `moment` = sum z exp(z)."""

    peak: Float[Array, "R tiles"]
    whole: Float[Array, "R tiles"]
    mass: Float[Array, "R tiles"]
    moment: Float[Array, "R tiles"]


class Part(NamedTuple):
    """What a part of the vocabulary knows of R rows: its best score, whose id and logit; of its allowed ids peak / T,
    mass and moment as above; of all its ids peak, mass and the first one at the peak."""

    score: Float[Array, " R"]
    token: Int[Array, " R"]
    logit: Float[Array, " R"]
    peak: Float[Array, " R"]
    mass: Float[Array, " R"]
    moment: Float[Array, " R"]
    top: Float[Array, " R"]
    whole: Float[Array, " R"]
    argmax_token: Int[Array, " R"]


def of_tile(logits, there, lowest, inverse):
    """The tile math of every backend, over the last axis, which is kept: `there` bool says which numbers are logits of this
    tile, `lowest` and `inverse` (1 / temperature) broadcast. (peak, whole, mass, moment)."""
    logits = jnp.where(there, jnp.maximum(logits, LOWEST), LOWEST)
    peak = jnp.max(logits, axis=-1, keepdims=True)
    below = logits - peak
    whole = jnp.sum(jnp.where(there, jnp.exp(below), 0.0), axis=-1, keepdims=True)
    scaled = below * inverse
    weight = jnp.where(there & (logits >= lowest), jnp.exp(scaled), 0.0)
    return peak, whole, jnp.sum(weight, axis=-1, keepdims=True), jnp.sum(weight * scaled, axis=-1, keepdims=True)


def row_numbers(
    temperatures: Float[Array, " R"], thresholds: Float[Array, " R"] | None
) -> tuple[Float[Array, " R"], Float[Array, " R"]]:
    """(lowest, inverse): the lowest logit that is allowed, never below a tenth of LOWEST, and 1 / temperature."""
    lowest = jnp.full_like(temperatures, LOWEST / 10) if thresholds is None else jnp.maximum(thresholds, LOWEST / 10)
    return lowest, 1.0 / jnp.where(temperatures == 0, 1.0, temperatures)


def part(
    logits: Float[Array, "R V"],
    found: Statistics,
    seeds: UInt32[Array, "R 2"],
    positions: Int[Array, " R"],
    temperatures: Float[Array, " R"],
    thresholds: Float[Array, " R"] | None,
    first: Int[Array, ""] | int = 0,
) -> Part:
    """Draws among the ids of `logits`, whose first tile is the vocabulary's tile `first`."""
    greedy, (lowest, inverse) = temperatures == 0, row_numbers(temperatures, thresholds)
    allowed = found.mass > 0
    peaks = jnp.where(allowed, found.peak * inverse[:, None], LOWEST)
    scores = peaks + jnp.where(greedy[:, None], 0.0, _tile_noise(found, seeds, positions, first))
    scores = jnp.where(allowed, scores, -jnp.inf)
    best = jnp.argmax(scores, axis=-1).astype(jnp.int32)
    token, logit = _inside(logits, best, seeds, positions, greedy, lowest, inverse, first)

    peak, top = jnp.max(peaks, axis=-1), jnp.max(found.peak, axis=-1)
    share = jnp.where(allowed, jnp.exp(peaks - peak[:, None]), 0.0)
    moment = jnp.where(allowed, share * (found.moment + (peaks - peak[:, None]) * found.mass), 0.0)
    return Part(
        score=jnp.max(scores, axis=-1),
        token=token,
        logit=logit,
        peak=peak,
        mass=jnp.sum(share * found.mass, axis=-1),
        moment=jnp.sum(moment, axis=-1),
        top=top,
        whole=jnp.sum(jnp.exp(found.peak - top[:, None]) * found.whole, axis=-1),
        argmax_token=_argmax(logits, found.peak) + first * TILE,
    )


def _tile_noise(found: Statistics, seeds: Array, positions: Array, first: Array | int) -> Float[Array, "R tiles"]:
    """What the score of a tile has above its scaled peak: the log of its mass, and its Gumbel number."""
    rows, tiles = found.mass.shape
    words = jnp.uint32(sampling.TILE_TAG) + jnp.arange(tiles, dtype=jnp.uint32) + jnp.asarray(first).astype(jnp.uint32)
    noise = sampling.gumbel(seeds, positions, jnp.broadcast_to(words, (rows, tiles)))
    return jnp.log(jnp.where(found.mass > 0, found.mass, 1.0)) + noise


def _tile(logits: Array, tile: Array) -> tuple[Array, Array, Array]:
    """Of each row's tile [R]: the columns [R, TILE], which of them there are, and their logits."""
    column, vocab = tile[:, None] * TILE + jnp.arange(TILE, dtype=jnp.int32), logits.shape[-1]
    return column, column < vocab, jnp.take_along_axis(logits, jnp.minimum(column, vocab - 1), axis=-1)


def _argmax(logits: Array, peaks: Array) -> Int[Array, " R"]:
    """The first column with the highest logit."""
    tile = sampling.first_highest(peaks)
    _, there, raw = _tile(logits, tile)
    return tile * TILE + sampling.first_highest(jnp.where(there, raw, -jnp.inf))


def _inside(
    logits: Array,
    best: Array,
    seeds: Array,
    positions: Array,
    greedy: Array,
    lowest: Array,
    inverse: Array,
    first: Array | int,
) -> tuple[Int[Array, " R"], Float[Array, " R"]]:
    """The id that wins in each row's best tile, and its logit."""
    column, there, raw = _tile(logits, best)
    ids = column + first * TILE
    noise = jnp.where(greedy[:, None], 0.0, sampling.gumbel(seeds, positions, ids.astype(jnp.uint32)))
    noisy = jnp.where(there & (raw >= lowest[:, None]), raw * inverse[:, None] + noise, -jnp.inf)
    place = sampling.first_highest(noisy)[:, None]
    return tuple(jnp.take_along_axis(x, place, axis=-1)[:, 0] for x in (ids, raw))


def drawn(parts: Part, temperatures: Float[Array, " R"]) -> sampling.Drawn:
    """The rows' draws from the parts of the vocabulary, [parts, R] in rising order of ids."""
    inverse = row_numbers(temperatures, None)[1]
    winner = jnp.argmax(parts.score, axis=0)[None]
    token, logit = (jnp.take_along_axis(x, winner, axis=0)[0] for x in (parts.token, parts.logit))
    peak, top = jnp.max(parts.peak, axis=0), jnp.max(parts.top, axis=0)
    share, apart = jnp.exp(parts.peak - peak), parts.peak - peak
    mass = jnp.sum(share * parts.mass, axis=0)
    moment = jnp.sum(jnp.where(parts.mass > 0, share * (parts.moment + apart * parts.mass), 0.0), axis=0)
    whole = jnp.sum(jnp.exp(parts.top - top) * parts.whole, axis=0)
    likeliest = jnp.take_along_axis(parts.argmax_token, sampling.first_highest(parts.top.T)[None], axis=0)[0]
    return sampling.Drawn(
        token,
        logit * inverse - peak - jnp.log(mass),
        jnp.log(mass) - moment / mass,
        logit - top - jnp.log(whole),
        likeliest,
    )
