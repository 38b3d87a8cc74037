"""Packing for training: groups in, arrays of one static shape out.

A row holds several sequences (prompt and rollout) one after another. Each sequence is a segment with its own
positions.

Everything is indexed AT the token. loss_mask[b, t] means that tokens[b, t] was sampled and is trained on. Log-probs,
advantage and version at [b, t] belong to the same token. The model predicts the token from the position before, in the
same segment. Only the code that computes log-probs shifts.

Placement is first-fit-decreasing and a function of the lengths alone. Refuses a sequence longer than a row, and a
parked rollout.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import numpy as np
from jaxtyping import Int

from jaxrl_post.algorithms.credit import Credit
from jaxrl_post.types import Finish, Group, Rollout, RolloutId


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=[
        "tokens",
        "positions",
        "segment_ids",
        "group_ids",
        "versions",
        "loss_mask",
        "loss_weights",
        "loss_counts",
        "advantages",
        "returns",
        "values",
        "rollout_logprobs",
        "old_logprobs",
        "ref_logprobs",
        "corrections",
        "prox_weights",
        "positives",
        "held",
        "noise_keys",
        "noise_scales",
    ],
    meta_fields=[],
)
@dataclass(frozen=True, kw_only=True)
class Batch:
    """A micro-batch with leaves [B, T]: a pytree of numpy arrays on the host and of jax arrays on the device.

    - tokens, int32
    - positions, int32: restart in each segment
    - segment_ids, int32: from 1 in each row; 0 is padding
    - group_ids, int32: index in the packed list of groups; -1 is padding
    - versions, int32: -1 where nothing was sampled
    - loss_mask, bool
    - loss_weights, floating: factor of the token's loss in the sum
    - loss_counts, int32: the loss is divided by their sum. A rollout's count stands at its first trained token.
    - corrections, floating: further weights of the policy's loss
    - values, returns, floating: of a critic, before the token
    - prox_weights, floating: how far old_logprobs (then the engine's) are moved towards the learner's
      (algorithms/correction.py)
    - positives, floating: 1 for a rollout with a positive reward
    - held, floating: 1 for a token that KL-Cov holds at the old policy
    - noise_keys, uint32 [B, T, 2], and noise_scales, floating: of noise on embeddings (embedding_noise.py)
    - the others, floating

    Floating leaves are 0 where the mask is not set. Leaves of a critic, reference, old policy, correction or further term
    that the run does not have are None, in every batch alike.
    """

    tokens: Any
    positions: Any
    segment_ids: Any
    group_ids: Any
    versions: Any
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
    noise_keys: Any = None
    noise_scales: Any = None


class Place(NamedTuple):
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
    old_logprobs: Mapping[RolloutId, np.ndarray] | None = None,
    ref_logprobs: Mapping[RolloutId, np.ndarray] | None = None,
    corrected: bool = False,
    prox_weights: Mapping[RolloutId, np.ndarray] | None = None,
    critic: bool = False,
    marks: Sequence[str] = (),
    dtype: Any = np.float32,
) -> tuple[list[Batch], list[Place]]:
    """Returns micro-batches of static shape [rows, tokens] that hold every rollout of `groups` once, whole.

    Args:
      credits: each rollout's advantages, weight and count for the loss, by id. None: no mask is set, the batch is only
        scored.
      old_logprobs, ref_logprobs, prox_weights: per rollout float[T] over its tokens; None where the run has none.
      corrected, critic: whether credits hold corrections, and a critic's values and returns.
      marks: the leaves that credits hold as marks.
      dtype: of the floating leaves.
    Returns:
      the batches, and the place of each rollout, in the order of groups and rollouts. A rollout of weight 0 (for
      example an unscored one) is placed with its mask unset. It enters neither numerator nor count of any loss.
    Raises:
      ValueError: a sequence is longer than `tokens`, or a rollout did not finish.
    """
    members = [(g, i, rollout) for g, group in enumerate(groups) for i, rollout in enumerate(group.rollouts)]
    for _, _, rollout in members:
        _refuse_unfinished(rollout)
    lengths = check_lengths(groups, tokens)
    row, start, used = place(lengths, tokens)
    there = old_logprobs is not None, ref_logprobs is not None, corrected, prox_weights is not None, critic
    arrays = _empty(-(-used // rows) * rows, tokens, dtype, *there, marks)
    segments = np.zeros(arrays["tokens"].shape[0], np.int32)
    given = {"old_logprobs": old_logprobs, "ref_logprobs": ref_logprobs, "prox_weights": prox_weights}
    for n in np.lexsort((start, row)):  # along each row, so that segments are numbered from left to right
        g, _, rollout = members[n]
        segments[row[n]] += 1
        _write(arrays, row[n], start[n], rollout, segments[row[n]], g)
        tail = slice(start[n] + rollout.prompt.tokens.size, start[n] + rollout.prompt.tokens.size + len(rollout))
        for name, values in given.items():
            if values is not None:
                arrays[name][row[n], tail] = np.where(rollout.sampled, values[rollout.id], 0.0)
        if credits is not None and credits[rollout.id].weight > 0:
            _credit(arrays, row[n], tail, rollout.sampled, credits[rollout.id])
    places = [_place(rollout, int(row[n]), int(start[n]), rows) for n, (_, _, rollout) in enumerate(members)]
    cuts = range(0, arrays["tokens"].shape[0], rows)
    return [Batch(**{name: array[at : at + rows] for name, array in arrays.items()}) for at in cuts], places


def _place(rollout: Rollout, row: int, start: int, rows: int) -> Place:
    """Returns a rollout's place from its row among all micro-batches and the start of its segment."""
    return Place(rollout.id, row // rows, row % rows, start + rollout.prompt.tokens.size, len(rollout))


def count(groups: Sequence[Group], rows: int, tokens: int) -> int:
    """Returns the number of micro-batches that `pack` makes of these groups."""
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
    rows: int,
    tokens: int,
    dtype: Any,
    *,
    old: bool,
    reference: bool,
    corrected: bool,
    prox: bool = False,
    critic: bool = False,
    marks: Sequence[str] = (),
) -> Batch:
    """Returns a batch of padding with the leaves that `pack` would make: the shape to compile for."""
    return Batch(**_empty(rows, tokens, dtype, old, reference, corrected, prox, critic, marks))


def answers(arrays: Sequence[np.ndarray], places: Sequence[Place]) -> dict[RolloutId, np.ndarray]:
    """Cuts the [rows, tokens] results of each batch into one vector per rollout, over its tokens."""
    return {p.rollout_id: np.array(arrays[p.batch][p.row, p.start : p.start + p.length]) for p in places}


def _refuse_unfinished(rollout: Rollout) -> None:
    if rollout.finish is Finish.PARKED:
        raise ValueError(
            f"batch: rollout {tuple(rollout.id)} is {rollout.finish.name}; only finished ones (EOS, STOP, "
            f"LENGTH) can be trained on"
        )


def _empty(
    rows: int,
    tokens: int,
    dtype,
    old: bool,
    reference: bool,
    corrected: bool,
    prox: bool,
    critic: bool,
    marks: Sequence[str],
) -> dict[str, np.ndarray]:
    def filled(value, kind):
        return np.full((rows, tokens), value, kind)

    arrays = dict(
        tokens=filled(0, np.int32),
        positions=filled(0, np.int32),
        segment_ids=filled(0, np.int32),
        group_ids=filled(-1, np.int32),
        versions=filled(-1, np.int32),
        loss_mask=filled(False, bool),
        loss_weights=filled(0, dtype),
        loss_counts=filled(0, np.int32),
        advantages=filled(0, dtype),
        rollout_logprobs=filled(0, dtype),
    )
    for name, there in (
        ("old_logprobs", old),
        ("ref_logprobs", reference),
        ("corrections", corrected),
        ("prox_weights", prox),
        ("values", critic),
        ("returns", critic),
        *((name, True) for name in marks),
    ):
        if there:
            arrays[name] = filled(0, dtype)
    return arrays


def _write(arrays: dict[str, np.ndarray], row: int, start: int, rollout: Rollout, segment: int, group: int) -> None:
    """Writes a rollout's tokens, positions, segment, group, versions and log-probs."""
    prompt, answer = rollout.prompt.tokens.size, len(rollout)
    whole, tail = slice(start, start + prompt + answer), slice(start + prompt, start + prompt + answer)
    arrays["tokens"][row, whole] = np.concatenate([rollout.prompt.tokens, rollout.tokens])
    arrays["positions"][row, whole] = np.arange(prompt + answer)
    arrays["segment_ids"][row, whole] = segment
    arrays["group_ids"][row, whole] = group
    arrays["versions"][row, tail] = np.where(rollout.sampled, rollout.versions, -1)
    arrays["rollout_logprobs"][row, tail] = np.where(rollout.sampled, rollout.logprobs, 0.0)


def _credit(arrays: dict[str, np.ndarray], row: int, tail: slice, sampled: np.ndarray, credit: Credit) -> None:
    """Writes a rollout's mask, weights, count, advantages, corrections, values, returns and marks for the loss."""
    arrays["loss_mask"][row, tail] = sampled
    arrays["loss_weights"][row, tail] = np.where(sampled, credit.weight, 0.0)
    if sampled.any():
        arrays["loss_counts"][row, tail.start + int(np.argmax(sampled))] = credit.count
    arrays["advantages"][row, tail] = np.where(sampled, credit.advantages, 0.0)
    given = {"corrections": credit.correction, "values": credit.values, "returns": credit.returns, **credit.marks}
    for name, values in given.items():
        if values is not None:
            arrays[name][row, tail] = np.where(sampled, values, 0.0)
