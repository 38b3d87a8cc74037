"""Packing for training: groups in, arrays of one static shape out.

A row holds several sequences (prompt and rollout) one after another. Each sequence is a segment with its own
positions.

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
from jaxrl_post.ring.types import Finish, Group, Rollout, RolloutId


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class Batch:
    """A micro-batch with leaves [B, T]: a pytree of numpy arrays on the host and of jax arrays on the device.

    - tokens, int32
    - positions, int32: restart in each segment
    - segment_ids, int32: from 1 in each row; 0 is padding
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

    Floating leaves are 0 where the mask is not set. Leaves of a critic, reference, old policy, correction or further term
    that the run does not have are None, in every batch alike.
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


class RolloutSpan(NamedTuple):
    """The place of a rollout's tokens: token i is at [batch][row, start + i], i < length."""

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
    Returns:
      the batches, and the place of each rollout, in the order of groups and rollouts. A rollout of weight 0 (for
      example an unscored one) is placed with its mask unset. It enters neither numerator nor count of any loss.
    Raises:
      ValueError: a sequence is longer than `tokens`, or a rollout did not finish.
    """
    rollouts = [rollout for group in groups for rollout in group.rollouts]
    for rollout in rollouts:
        if rollout.finish is Finish.PARKED:
            raise ValueError(
                f"batch: rollout {tuple(rollout.id)} is {rollout.finish.name}; only finished ones (EOS, STOP, "
                f"LENGTH) can be trained on"
            )
    lengths = check_lengths(groups, tokens)
    row, start, used = place(lengths, tokens)
    arrays = _empty(-(-used // rows) * rows, tokens, dtype, {*leaves, *given}, kept_ids, route_words)
    segments = np.zeros(arrays["tokens"].shape[0], np.int32)
    for n in np.lexsort((start, row)):  # along each row, so that segments are numbered from left to right
        rollout = rollouts[n]
        segments[row[n]] += 1
        _write(arrays, row[n], start[n], rollout, segments[row[n]])
        tail = slice(start[n] + rollout.prompt.tokens.size, start[n] + rollout.prompt.tokens.size + len(rollout))
        if kept_ids or route_words:
            kept, routes = rollout.records.split(route_words)
            for name, values in (("kept", kept.rows(kept_ids)), ("routes", routes)):
                if name in arrays:
                    arrays[name][row[n], tail] = values
        for name, values in given.items():
            arrays[name][row[n], tail] = np.where(rollout.sampled, values[rollout.id], 0.0)
        if credits is not None and credits[rollout.id].weight > 0:
            _credit(arrays, row[n], tail, rollout.sampled, credits[rollout.id])
    places = [
        RolloutSpan(rollout.id, r // rows, r % rows, begin + rollout.prompt.tokens.size, len(rollout))
        for rollout, r, begin in zip(rollouts, row.tolist(), start.tolist(), strict=True)
    ]
    cuts = range(0, arrays["tokens"].shape[0], rows)
    return [Batch(**{name: array[at : at + rows] for name, array in arrays.items()}) for at in cuts], places


def count(groups: Sequence[Group], rows: int, tokens: int) -> int:
    return -(-place(check_lengths(groups, tokens), tokens)[2] // rows)


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
    rows: int, tokens: int, dtype: Any, leaves: Collection[str] = (), kept_ids: int = 0, route_words: int = 0
) -> Batch:
    """Returns a batch of padding with the leaves that `pack` would make: the shape to compile for."""
    return Batch(**_empty(rows, tokens, dtype, leaves, kept_ids, route_words))


def unrouted(batch: Batch) -> Batch:
    """Returns a batch in which no token has a recorded route."""
    return dataclasses.replace(batch, routes=np.full_like(batch.routes, -1))


def per_rollout(arrays: Sequence[np.ndarray], places: Sequence[RolloutSpan]) -> dict[RolloutId, np.ndarray]:
    """Cuts the [rows, tokens] results of each batch into one vector per rollout, over its tokens."""
    return {p.rollout_id: np.array(arrays[p.batch][p.row, p.start : p.start + p.length]) for p in places}


def _empty(
    rows: int, tokens: int, dtype: Any, leaves: Collection[str], kept_ids: int, route_words: int
) -> dict[str, np.ndarray]:
    kinds = dict.fromkeys(("tokens", "positions", "segment_ids", "loss_counts"), np.int32) | {"loss_mask": bool}
    kinds |= dict.fromkeys(("loss_weights", "advantages", "rollout_logprobs", *leaves), dtype)
    widths = {"kept": kept_ids, "routes": route_words}
    records = {name: np.full((rows, tokens, width), -1, np.int32) for name, width in widths.items() if width}
    return {name: np.zeros((rows, tokens), kind) for name, kind in kinds.items()} | records


def _write(arrays: dict[str, np.ndarray], row: int, start: int, rollout: Rollout, segment: int) -> None:
    prompt, answer = rollout.prompt.tokens.size, len(rollout)
    whole, tail = slice(start, start + prompt + answer), slice(start + prompt, start + prompt + answer)
    arrays["tokens"][row, whole] = np.concatenate([rollout.prompt.tokens, rollout.tokens])
    arrays["positions"][row, whole] = np.arange(prompt + answer)
    arrays["segment_ids"][row, whole] = segment
    arrays["rollout_logprobs"][row, tail] = np.where(rollout.sampled, rollout.logprobs, 0.0)


def _credit(arrays: dict[str, np.ndarray], row: int, tail: slice, sampled: np.ndarray, credit: Credit) -> None:
    arrays["loss_mask"][row, tail] = sampled
    arrays["loss_weights"][row, tail] = np.where(sampled, credit.weight, 0.0)
    if sampled.any():
        arrays["loss_counts"][row, tail.start + int(np.argmax(sampled))] = credit.count
    arrays["advantages"][row, tail] = np.where(sampled, credit.advantages, 0.0)
    given = {"corrections": credit.correction, "values": credit.values, "returns": credit.returns, **credit.marks}
    for name, values in given.items():
        if values is not None:
            arrays[name][row, tail] = np.where(sampled, values, 0.0)
