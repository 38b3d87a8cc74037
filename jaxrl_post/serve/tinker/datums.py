"""Datums of a request, packed into micro-batches of one static shape.

Invariant: where a datum lies is a function of the lengths of its own request alone. So what other clients train changes no
bit of it. Everything is indexed at the input token; the target at [b, t] is what stands behind the input at [b, t].
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from jaxrl_post.trainer import packing


@dataclass(frozen=True, kw_only=True)
class Datum:
    """Inputs and targets of one sequence, int32[N] each, and what the losses read, float32[N] each.

    Tensors that the loss does not read are zeros.
    """

    tokens: np.ndarray
    targets: np.ndarray
    weights: np.ndarray
    advantages: np.ndarray
    logprobs: np.ndarray

    def __len__(self) -> int:
        return self.tokens.size


class Micro(NamedTuple):
    """A micro-batch. `targets`: int32[rows, tokens]."""

    batch: packing.Batch
    targets: Any


class Place(NamedTuple):
    """Where a datum lies: its numbers are at [micro][row, start : start + length]."""

    micro: int
    row: int
    start: int
    length: int


def pack(datums: Sequence[Datum], rows: int, tokens: int) -> tuple[list[Micro], list[Place]]:
    """Returns micro-batches [rows, tokens] that hold every datum whole, and the places in the order of the datums.

    No datum may be longer than `tokens`.
    """
    row, start, used = packing.place(np.array([len(one) for one in datums], np.int64), tokens)
    blank = packing.blank(-(-used // rows) * rows, tokens, np.float32, old=False, reference=False, corrected=False)
    targets, segments = np.zeros_like(blank.tokens), np.zeros(len(blank.tokens), np.int32)
    for index in np.lexsort((start, row)):  # along each row, so that segments are numbered from left to right
        one, r = datums[index], row[index]
        segments[r] += 1
        at = r, slice(start[index], start[index] + len(one))
        blank.tokens[at], targets[at] = one.tokens, one.targets
        blank.positions[at], blank.segment_ids[at] = np.arange(len(one)), segments[r]
        blank.loss_mask[at], blank.loss_weights[at] = True, one.weights
        blank.advantages[at], blank.rollout_logprobs[at] = one.advantages, one.logprobs
    leaves = {name: leaf for name, leaf in _leaves(blank).items() if leaf is not None}
    cuts = [slice(at, at + rows) for at in range(0, len(blank.tokens), rows)]
    micros = [Micro(packing.Batch(**{name: leaf[cut] for name, leaf in leaves.items()}), targets[cut]) for cut in cuts]
    places = [Place(int(r) // rows, int(r) % rows, int(s), len(one)) for r, s, one in zip(row, start, datums)]
    return micros, places


def unpacked(arrays: Sequence[np.ndarray], places: Sequence[Place]) -> list[np.ndarray]:
    """Cuts the [rows, tokens] results of each micro-batch into one vector for each datum."""
    return [np.array(arrays[p.micro][p.row, p.start : p.start + p.length]) for p in places]


def _leaves(batch: packing.Batch) -> dict[str, np.ndarray | None]:
    return {one.name: getattr(batch, one.name) for one in dataclasses.fields(batch)}
