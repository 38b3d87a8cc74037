"""Sampling law 1 by tiles: a kernel computes statistics of each tile of 1024 ids, and rows sample from the statistics.

The kernel reads the vocabulary once and needs no noise. It returns four numbers a tile. The rest touches a thousandth
of the vocabulary: noise for every tile, then for the ids of the winning tile. A device that holds a part of the
vocabulary (whole tiles) samples among its own ids. Eight numbers a row from each device then decide.

Law, noise and invariant are those of kernels/sampling.py: a row's result depends on that row's inputs alone.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from jaxrl_post.kernels import sampling

TILE = sampling.TILE
LOWEST = -1e30  # replaces -inf, so that differences are finite


class Statistics(NamedTuple):
    """Of each tile, float32.

    peak: the highest logit. whole: sum exp(logit - peak) over all ids. With z = (logit - peak) / temperature, over the
    ids that the threshold allows: mass = sum exp(z), moment = sum z exp(z)."""

    peak: Float[Array, "R tiles"]
    whole: Float[Array, "R tiles"]
    mass: Float[Array, "R tiles"]
    moment: Float[Array, "R tiles"]


class Part(NamedTuple):
    """What one part of the vocabulary contributes to R rows.

    score, token, logit: best score, its id and its logit. peak, mass, moment: of the allowed ids, with peak / T. top,
    whole, argmax_token: peak and mass of all ids, and the first id at the peak."""

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
    """Returns (peak, whole, mass, moment) over the last axis, which is kept: the tile math of every backend.

    `there` bool: which numbers are logits of this tile. `lowest` and `inverse` (1 / temperature) broadcast."""
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
    """Returns (lowest, inverse): the lowest allowed logit, never below a tenth of LOWEST, and 1 / temperature."""
    lowest = jnp.full_like(temperatures, LOWEST / 10) if thresholds is None else jnp.maximum(thresholds, LOWEST / 10)
    return lowest, 1.0 / jnp.where(temperatures == 0, 1.0, temperatures)


class InMemory(NamedTuple):
    """Logits [R, V] that a kernel reads where they lie. load: returns those of columns [R, W]."""

    load: Callable[[Int[Array, "R W"]], Float[Array, "R W"]]
    shape: tuple[int, int]


def _read(logits: Array | InMemory, columns: Int[Array, "R W"]) -> Float[Array, "R W"]:
    if isinstance(logits, InMemory):
        return logits.load(columns)
    return jnp.take_along_axis(logits, columns, axis=-1)


def part(
    logits: Float[Array, "R V"] | InMemory,
    found: Statistics,
    seeds: sampling.Seeds,
    positions: Int[Array, " R"],
    temperatures: Float[Array, " R"],
    thresholds: Float[Array, " R"] | None,
    first: Int[Array, ""] | int = 0,
) -> Part:
    """Samples among the ids of `logits`, whose first tile is the vocabulary's tile `first`."""
    greedy, (lowest, inverse) = temperatures == 0, row_numbers(temperatures, thresholds)
    allowed = found.mass > 0
    peaks = jnp.where(allowed, found.peak * inverse[:, None], LOWEST)
    scores = peaks + jnp.where(greedy[:, None], 0.0, _tile_noise(found, seeds, positions, first))
    scores = jnp.where(allowed, scores, -jnp.inf)
    best = jnp.minimum(jnp.argmax(scores, axis=-1).astype(jnp.int32), -(-logits.shape[-1] // TILE) - 1)
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


def sampled(
    logits: Float[Array, "R V"] | InMemory,
    found: Statistics,
    seeds: sampling.Seeds,
    positions: Int[Array, " R"],
    temperatures: Float[Array, " R"],
    thresholds: Float[Array, " R"] | None,
    given: Int[Array, " R"] | None = None,
) -> sampling.Drawn:
    """Returns the rows' samples where one device has the whole vocabulary."""
    one = part(logits, found, seeds, positions, temperatures, thresholds)
    one = one if given is None else given_part(one, logits, given, temperatures, thresholds)
    inverse = row_numbers(temperatures, None)[1]
    return sampling.Drawn(
        one.token,
        one.logit * inverse - one.peak - jnp.log(one.mass),
        jnp.log(one.mass) - one.moment / one.mass,
        one.logit - one.top - jnp.log(one.whole),
        one.argmax_token,
    )


def given_part(
    part: Part,
    logits: Float[Array, "R V"] | InMemory,
    given: Int[Array, " R"],
    temperatures: Float[Array, " R"],
    thresholds: Float[Array, " R"] | None,
    first: Int[Array, ""] | int = 0,
) -> Part:
    """Returns the part with `given` ids for its samples, as sampling.sample takes them."""
    column, lowest = given - first * TILE, row_numbers(temperatures, thresholds)[0]
    here = (column >= 0) & (column < logits.shape[-1])
    raw = jnp.sum(_read(logits, jnp.clip(column, 0, logits.shape[-1] - 1)[:, None]), axis=-1)  # of one column
    logit = jnp.where(raw >= lowest, raw, -jnp.inf)
    return part._replace(
        score=jnp.where(given < 0, part.score, jnp.where(here, jnp.inf, -jnp.inf)),
        token=jnp.where(given < 0, part.token, given),
        logit=jnp.where(given < 0, part.logit, logit),
    )


def _tile_noise(
    found: Statistics, seeds: sampling.Seeds, positions: Array, first: Array | int
) -> Float[Array, "R tiles"]:
    """Returns each tile's score minus its scaled peak: the log of its mass plus its Gumbel number."""
    rows, tiles = found.mass.shape
    words = jnp.arange(tiles, dtype=jnp.uint32) + np.uint32(sampling.TILE_TAG)
    words = words + (np.uint32(first) if isinstance(first, int) else first.astype(jnp.uint32))
    noise = sampling.gumbel(seeds, positions, jnp.broadcast_to(words, (rows, tiles)))
    return jnp.log(jnp.where(found.mass > 0, found.mass, 1.0)) + noise


def _tile(logits: Array | InMemory, tile: Array) -> tuple[Array, Array, Array]:
    """Returns, of each row's tile [R]: the columns [R, TILE], whether each exists, and their logits."""
    column, vocab = tile[:, None] * TILE + jnp.arange(TILE, dtype=jnp.int32), logits.shape[-1]
    return column, column < vocab, _read(logits, jnp.minimum(column, vocab - 1))


def _argmax(logits: Array | InMemory, peaks: Array) -> Int[Array, " R"]:
    """Returns the first column with the highest logit."""
    tile = sampling.first_highest(peaks)
    _, there, raw = _tile(logits, tile)
    return tile * TILE + sampling.first_highest(jnp.where(there, raw, -jnp.inf))


def _inside(
    logits: Array | InMemory,
    best: Array,
    seeds: sampling.Seeds,
    positions: Array,
    greedy: Array,
    lowest: Array,
    inverse: Array,
    first: Array | int,
) -> tuple[Int[Array, " R"], Float[Array, " R"]]:
    """Returns the winning id in each row's best tile, and its logit."""
    column, there, raw = _tile(logits, best)
    ids = column + first * TILE
    noise = jnp.where(greedy[:, None], 0.0, sampling.gumbel(seeds, positions, ids.astype(jnp.uint32)))
    noisy = jnp.where(there & (raw >= lowest[:, None]), raw * inverse[:, None] + noise, -jnp.inf)
    won = jnp.arange(TILE) == sampling.first_highest(noisy)[:, None]  # kernels have no indexing
    return tuple(jnp.sum(jnp.where(won, x, 0), axis=-1, dtype=x.dtype) for x in (ids, raw))


def drawn(parts: Part, temperatures: Float[Array, " R"]) -> sampling.Drawn:
    """Returns the rows' samples from the parts of the vocabulary, [parts, R] in rising order of ids."""
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
