"""Packing for training: groups in, arrays of one static shape out.

A row holds several sequences (prompt and rollout) one after another. Each sequence is a segment with its own
positions. With shared prompts the texts of a group share what they begin with (shared_prompts.py): what a rollout does
not share is its segment.

Everything is indexed AT the token. loss_mask[b, t] means that tokens[b, t] was sampled and is trained on. Log-probs
and the advantage at [b, t] belong to the same token. The model predicts the token from the position before, in the
same segment. Only the code that computes log-probs shifts.

Placement is first-fit-decreasing and a function of the lengths alone. Refuses a sequence longer than a row, and a
parked rollout.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, NamedTuple

import jax
import numpy as np
from jaxtyping import Int

from jaxrl_post.algorithms.credit import Credit
from jaxrl_post.ring.types import Finish, Group, RolloutId
from jaxrl_post.trainer import shared_prompts
from jaxrl_post.trainer.shared_prompts import Layout

PARTS = (1, 2, 4)  # of a row, that the texts of a group may take


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class Batch:
    """A micro-batch with leaves [B, T]: a pytree of numpy arrays on the host and of jax arrays on the device.

    - tokens, int32
    - positions, int32: restart in each segment
    - segment_ids, int32: from 1 in each row; 0 is padding
    - until, int32: the place in the row behind the last token that sees this one, where texts share prompts
    - loss_mask, bool
    - loss_weights, floating: factor of the token's loss in the sum
    - loss_counts, int32: the loss is divided by their sum. A rollout's count stands at its first trained token.
    - corrections, floating: further weights of the policy's loss
    - values, returns, floating: of a critic, before the token
    - prox_weights, floating: how far old_logprobs (then the engine's) are moved towards the learner's
      (algorithms/correction.py)
    - positives, floating: 1 for a rollout with a positive reward
    - held, floating: 1 for a token that KL-Cov holds at the old policy
    - kept, int32 [B, T, K]: the ids that the token was drawn from (logprobs.members); -1 behind the last one
    - noise_keys, uint32 [B, T, 2], and noise_scales, floating: of noise on embeddings (embedding.py)
    - the others, floating

    Floating leaves are 0 where the mask is not set. Leaves of a critic, reference, old policy, correction, further term or
    shared prompts that the run does not have are None, in every batch alike.
    """

    tokens: Any
    positions: Any
    segment_ids: Any
    loss_mask: Any
    loss_weights: Any
    loss_counts: Any
    advantages: Any
    returns: Any = None
    values: Any = None
    rollout_logprobs: Any
    old_logprobs: Any = None
    ref_logprobs: Any = None
    corrections: Any = None
    prox_weights: Any = None
    positives: Any = None
    held: Any = None
    kept: Any = None
    routes: Any = None
    noise_keys: Any = None
    noise_scales: Any = None
    until: Any = None


class RolloutSpan(NamedTuple):
    """The place of tokens that follow each other in a rollout: they are at [batch][row, start + i], i < length."""

    rollout_id: RolloutId
    batch: int
    row: int
    start: int
    length: int


def place(lengths: Int[np.ndarray, " n"], tokens: int) -> tuple[Int[np.ndarray, " n"], Int[np.ndarray, " n"], int]:
    """Places sequences in rows by first-fit-decreasing.

    The longest sequence comes first (ties by index). Each goes into the first row with enough space.

    Returns:
      row and start of each sequence, and the number of rows. No length may exceed `tokens`.
    """
    row, start = np.zeros(len(lengths), np.int32), np.zeros(len(lengths), np.int32)
    used = np.zeros(len(lengths), np.int64)
    rows = 0
    for i in np.argsort(-np.asarray(lengths), kind="stable"):
        fits = used[:rows] + lengths[i] <= tokens
        r = int(np.argmax(fits)) if fits.any() else rows
        rows = max(rows, r + 1)
        row[i], start[i] = r, used[r]
        used[r] += lengths[i]
    return row, start, rows


def pack(
    groups: Sequence[Group],
    credits: Mapping[RolloutId, Credit] | None,
    *,
    rows: int,
    tokens: int,
    leaves: Collection[str] = (),
    given: Mapping[str, Mapping[RolloutId, np.ndarray]] = MappingProxyType({}),
    dtype: Any = np.float32,
    kept_ids: int = 0,
    route_words: int = 0,
    shared: bool = False,
) -> tuple[list[Batch], list[RolloutSpan]]:
    """Returns micro-batches of static shape [rows, tokens] that hold every rollout of `groups` once, whole.

    Args:
      credits: each rollout's advantages, weight and count for the loss, by id. None: no mask is set, the batch is only
        scored.
      leaves: names of the optional leaves of the run: those of `given`, and those that credits fill.
      given: values of a leaf by its name, per rollout float[T] over its tokens.
      dtype: of the floating leaves.
      kept_ids: the most ids that a token's record has. 0: there are no records, and no leaf `kept`.
      route_words: the words of its route behind them. 0: there are no routes, and no leaf `routes`.
      shared: a group's texts share what they begin with, and there is the leaf `until`.
    Returns:
      the batches, and the place of each rollout, in the order of groups and rollouts; with shared turns in several
      spans. A rollout of weight 0 (for example an unscored one) is placed with its mask unset. It enters neither
      numerator nor count of any loss.
    Raises:
      ValueError: a sequence is longer than `tokens`, or a rollout did not finish.
    """
    for rollout in (rollout for group in groups for rollout in group.rollouts):
        if rollout.finish is Finish.PARKED:
            raise ValueError(
                f"batch: rollout {tuple(rollout.id)} is {rollout.finish.name}; only finished ones (EOS, STOP, "
                f"LENGTH) can be trained on"
            )
    texts = laid_out(groups, tokens, shared)
    row, start, used = place(_lengths(texts), tokens)
    arrays = _empty(-(-used // rows) * rows, tokens, dtype, {*leaves, *given}, kept_ids, route_words, shared)
    segments = np.zeros(arrays["tokens"].shape[0], np.int32)
    for n in np.lexsort((start, row)):  # along each row, so that segments are numbered from left to right
        layout, r, begin = texts[n], int(row[n]), int(start[n])
        _write(arrays, r, begin, layout, segments[r] + 1)
        segments[r] += len(layout.rollouts)
        for m, (rollout, columns) in enumerate(zip(layout.rollouts, layout.columns, strict=True)):
            own = layout.owners[columns] == m  # another one may have sampled a token that this one was given
            at = (r, begin + columns[own])
            leaf = {name: values[rollout.id] for name, values in given.items()} | {"rollout_logprobs": rollout.logprobs}
            for name, values in leaf.items():
                arrays[name][at] = np.where(rollout.sampled, values, 0.0)[own]
            if kept_ids or route_words:
                kept, routes = rollout.records.split(route_words)
                for name, values in (("kept", kept.rows(kept_ids)), ("routes", routes)):
                    if name in arrays:
                        arrays[name][at] = values[own]
            if credits is not None and credits[rollout.id].weight > 0:
                _credit(arrays, r, begin + columns, own, rollout.sampled, credits[rollout.id])
    places = [
        RolloutSpan(rollout.id, r // rows, r % rows, begin + int(stretch[0]) if len(stretch) else begin, len(stretch))
        for layout, r, begin in zip(texts, row.tolist(), start.tolist(), strict=True)
        for rollout, columns in zip(layout.rollouts, layout.columns, strict=True)
        for stretch in _stretches(columns)
    ]
    cuts = range(0, arrays["tokens"].shape[0], rows)
    return [Batch(**{name: array[at : at + rows] for name, array in arrays.items()}) for at in cuts], places


def laid_out(groups: Sequence[Group], tokens: int, shared: bool) -> list[Layout]:
    """Returns the texts of all rollouts as they are placed, in the order of groups and rollouts.

    shared: a group's texts share what they begin with. Long stretches leave gaps in rows, so the parts of a row that a
    group may take are tried as well, and texts that share nothing. The fewest rows win, then the longest stretches.

    Raises:
      ValueError: a sequence is longer than `tokens`.
    """
    check_lengths(groups, tokens)
    flat = [shared_prompts.alone(rollout) for group in groups for rollout in group.rollouts]
    if not shared:
        return flat
    ways = [*(shared_prompts.layouts(groups, tokens // part) for part in PARTS), flat]
    return min(ways, key=lambda texts: place(_lengths(texts), tokens)[2])


def _lengths(texts: Sequence[Layout]) -> Int[np.ndarray, " n"]:
    return np.array([len(one) for one in texts], np.int64)


def _stretches(columns: Int[np.ndarray, " T"]) -> list[Int[np.ndarray, " t"]]:
    """Returns places cut where the next one is not the one behind. There is at least one stretch."""
    return np.split(columns, np.flatnonzero(np.diff(columns) != 1) + 1)


def count(groups: Sequence[Group], rows: int, tokens: int, shared: bool = False) -> int:
    return -(-place(_lengths(laid_out(groups, tokens, shared)), tokens)[2] // rows)


def check_lengths(groups: Sequence[Group], tokens: int) -> Int[np.ndarray, " n"]:
    """Returns the length of prompt and rollout together, for each rollout in order.

    Raises:
      ValueError: a length exceeds a row of `tokens`.
    """
    rollouts = [rollout for group in groups for rollout in group.rollouts]
    lengths = np.array([rollout.prompt.tokens.size + len(rollout) for rollout in rollouts], np.int64)
    if lengths.size and lengths.max() > tokens:
        worst = rollouts[int(lengths.argmax())]
        raise ValueError(
            f"batch.tokens={tokens} cannot hold rollout {tuple(worst.id)}: prompt and rollout together are "
            f"{lengths.max()} tokens; the nearest valid value is {lengths.max()}"
        )
    return lengths


def blank(
    rows: int,
    tokens: int,
    dtype: Any,
    leaves: Collection[str] = (),
    kept_ids: int = 0,
    route_words: int = 0,
    shared: bool = False,
) -> Batch:
    """Returns a batch of padding with the leaves that `pack` would make: the shape to compile for."""
    return Batch(**_empty(rows, tokens, dtype, leaves, kept_ids, route_words, shared))


def unrouted(batch: Batch) -> Batch:
    """Returns a batch in which no token has a recorded route."""
    return dataclasses.replace(batch, routes=np.full_like(batch.routes, -1))


def per_rollout(arrays: Sequence[np.ndarray], places: Sequence[RolloutSpan]) -> dict[RolloutId, np.ndarray]:
    """Cuts the [rows, tokens] results of each batch into one vector per rollout, over its tokens."""
    found: dict[RolloutId, list[np.ndarray]] = {}
    for p in places:
        found.setdefault(p.rollout_id, []).append(arrays[p.batch][p.row, p.start : p.start + p.length])
    return {id: np.concatenate(parts) for id, parts in found.items()}


def _empty(
    rows: int, tokens: int, dtype: Any, leaves: Collection[str], kept_ids: int, route_words: int, shared: bool
) -> dict[str, np.ndarray]:
    kinds = dict.fromkeys(("tokens", "positions", "segment_ids", "loss_counts"), np.int32) | {"loss_mask": bool}
    kinds |= dict.fromkeys(("loss_weights", "advantages", "rollout_logprobs", *leaves), dtype)
    widths = {"kept": kept_ids, "routes": route_words}
    records = {name: np.full((rows, tokens, width), -1, np.int32) for name, width in widths.items() if width}
    if shared:  # padding sees itself alone
        records["until"] = np.tile(np.arange(1, tokens + 1, dtype=np.int32), (rows, 1))
    return {name: np.zeros((rows, tokens), kind) for name, kind in kinds.items()} | records


def _write(arrays: dict[str, np.ndarray], row: int, start: int, layout: Layout, segment: int) -> None:
    whole = slice(start, start + len(layout))
    arrays["tokens"][row, whole] = layout.tokens
    arrays["positions"][row, whole] = layout.positions
    arrays["segment_ids"][row, whole] = segment + layout.owners
    if "until" in arrays:
        arrays["until"][row, whole] = start + layout.until


def _credit(
    arrays: dict[str, np.ndarray],
    row: int,
    places: Int[np.ndarray, " T"],
    own: np.ndarray,
    sampled: np.ndarray,
    credit: Credit,
) -> None:
    at = (row, places[own])
    arrays["loss_mask"][at] = sampled[own]
    arrays["loss_weights"][at] = np.where(sampled, credit.weight, 0.0)[own]
    if sampled.any():
        arrays["loss_counts"][row, places[int(np.argmax(sampled))]] = credit.count
    arrays["advantages"][at] = np.where(sampled, credit.advantages, 0.0)[own]
    given = {"corrections": credit.correction, "values": credit.values, "returns": credit.returns, **credit.marks}
    for name, values in given.items():
        if values is not None:
            arrays[name][at] = np.where(sampled, values, 0.0)[own]
