"""Closed forms of published throughput and staleness models, for the simulator to be held against.

Times are in flashes, the time in which a chip does the arithmetic of one token's forward pass at its peak (PipelineRL, arXiv
2509.19128, appendix A). A step of h sequences on a chip takes h / U(h) flashes, U being the chip's utilisation.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True, kw_only=True)
class Rates:
    """Tokens per flash: generated, trained, and both together."""

    generated: float
    trained: float
    both: float


def conventional(alive: np.ndarray, *, chips: int, step: Callable[[np.ndarray], np.ndarray], train: float) -> Rates:
    """Generation and training take turns on all chips: 1 / (1/r_g + 1/r_t).

    Args:
      alive: int[L], sequences still alive at each step, spread evenly over the chips.
      step: flashes of a step by the sequences of a chip, h / U(h).
      train: flashes of training a token (the paper's tau).
    """
    generated = float(alive.sum() / step(alive / chips).sum())
    trained = chips / train
    return Rates(generated=generated, trained=trained, both=1 / (1 / generated + 1 / trained))


def pipelined(
    *, chips: int, generators: int, slots: int, step: Callable[[np.ndarray], np.ndarray], train: float
) -> Rates:
    """Side by side: `generators` chips always hold `slots` sequences each, the others train: min(I U(H), (N - I) / tau)."""
    generated = generators * slots / float(step(np.array([slots]))[0])
    trained = (chips - generators) / train
    return Rates(generated=generated, trained=trained, both=min(generated, trained))


def largest_lag(*, slots: int, generators: int, longest: float, mean: float, batch: int) -> int:
    """Optimizer steps between the weights that began a sequence of the longest length and those that train on it:
    ceil(H I L / (mean length * B))."""
    return math.ceil(slots * generators * longest / (mean * batch))


def uniform_alive(sequences: int, longest: int) -> np.ndarray:
    """f64[L]: expected sequences alive before each step, of lengths uniform in 1..L."""
    return sequences * (1 - np.arange(longest) / longest)


def staleness(*, slots: int, batch: int, queue: float, ratio: float, tail: float) -> float:
    """Mean staleness in steps of a sample, generator and learner side by side (Applied Compute, July 2026): `slots` samples
    at once, `queue` batches held at most, `ratio` of the generator's speed to the learner's, `tail` E[longest of a group] /
    E[length]."""
    if ratio < 1:
        return slots * tail / batch + ratio
    return slots * tail / (ratio * batch) + (2 * queue + ratio - 1) / (2 * ratio)
