"""Closed forms of published throughput and staleness models, to compare the simulator with.

Times are in flashes. A flash is the time in which a chip does the arithmetic of one token's forward pass at its peak
(PipelineRL, arXiv 2509.19128, appendix A). A step of h sequences on a chip takes h / U(h) flashes, where U is the
chip's utilisation.
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
    """Returns min(I U(H), (N - I) / tau): generation and training side by side.

    `generators` chips always hold `slots` sequences each. The others train.
    """
    generated = generators * slots / float(step(np.array([slots]))[0])
    trained = (chips - generators) / train
    return Rates(generated=generated, trained=trained, both=min(generated, trained))


def largest_lag(*, slots: int, generators: int, longest: float, mean: float, batch: int) -> int:
    """Returns ceil(H I L / (mean length * B)): the largest staleness of a sequence of the longest length.

    It is the optimizer steps between the weights that began the sequence and those that train on it.
    """
    return math.ceil(slots * generators * longest / (mean * batch))


def uniform_alive(sequences: int, longest: int) -> np.ndarray:
    """Returns f64[L]: expected sequences alive before each step, of lengths uniform in 1..L."""
    return sequences * (1 - np.arange(longest) / longest)


def staleness(*, slots: int, batch: int, queue: float, ratio: float, tail: float) -> float:
    """Returns the mean staleness of a sample in steps, generator and learner side by side (Applied Compute, July 2026).

    `slots`: samples at once. `queue`: batches held at most. `ratio`: the generator's speed over the learner's. `tail`:
    E[longest of a group] / E[length].
    """
    if ratio < 1:
        return slots * tail / batch + ratio
    return slots * tail / (ratio * batch) + (2 * queue + ratio - 1) / (2 * ratio)


def step_ends(times: np.ndarray, train_s: float, lag: int = 1) -> np.ndarray:
    """Returns float64[K], the time at which the training of each step ends.

    A replica starts its part of step k after its part of step k - 1. It also waits for the weights of step k - 1 -
    `lag`.

    Args:
      times: float[K, W], seconds that replica w works on step k.
      train_s: seconds of training per step.
      lag: how many steps old the weights may be. 0: rounds with a barrier.
    """
    steps, replicas = times.shape
    free, trained = np.zeros(replicas), np.zeros(steps)
    for k in range(steps):
        ready = trained[k - 1 - lag] if k > lag else 0.0
        free = np.maximum(free, ready) + times[k]
        trained[k] = max(free.max(), trained[k - 1] if k else 0.0) + train_s
    return trained
