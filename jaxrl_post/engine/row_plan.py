"""How the R rows of a step are given to slots: array code over numpy or jax.numpy, passed as `xp`.

Order of service: one row for every running slot; prefill rows, oldest slot first; rows that verify a prefix, shared
evenly; draft rows, the most valuable first. A slot whose forced rows were cut gets no candidate row. Invariant: the
plan decides when a position is computed, never its token.

Sums, ranks and levels are sums over pairs (kernels/pairs.py). A scan, a sort or a scatter would be several small kernels each in
every step on an accelerator, and slots are few. On GPUs the whole plan is one kernel (kernels/small_arrays.py).
"""

from __future__ import annotations

from typing import Any, NamedTuple

from jaxrl_post.kernels import pairs

Array = Any
VALUE_STEPS = 1 << 12


class Plan(NamedTuple):
    """The rows of a step, sorted by slot.

    `slot`, `offset` (position minus the slot's first position), `real`: [R]. `count`: rows of each slot, [S]. Head rows
    sample; they are compacted to a fixed number. `head_row` (index of the row), `head_slot`, `head_rank` (0 for a
    slot's first head), `head_real`: [places]."""

    slot: Array
    offset: Array
    real: Array
    count: Array
    head_row: Array
    head_slot: Array
    head_rank: Array
    head_real: Array


def level_fill(xp, wants: Array, budget: Array, order: Array, rounds: int) -> Array:
    """Returns int[S]: shares of `budget`, as even as possible, none above its want.

    What cannot be shared evenly goes to the first slots in `order`. `rounds`: bits of the largest level that can
    matter."""
    levels = xp.arange(1 << rounds, dtype=wants.dtype) + 1
    affordable = pairs.sums(xp, xp.minimum, (levels,), (wants,)) <= budget
    # Shares do not shrink as the level rises, so the number of levels is the highest one.
    level = xp.sum(affordable.astype(wants.dtype))
    share = xp.minimum(wants, level)
    more = (wants > level).astype(share.dtype)
    left = budget - xp.sum(share)
    return share + xp.where(_before(xp, more, order) + more <= left, more, 0)


def value_fill(xp, values: Array, budget: Array, order: Array) -> Array:
    """Returns int[S]: draft rows of each slot, at most `budget` in all, for the drafts with the highest values.

    `values` f32[S, W]: the chance that a slot's drafts up to this one are right, times the slot's weight. They do not
    increase along W, and 0 means no draft. They are compared in steps of 2^-12. Ties go to the first slot in `order`.
    """
    steps = xp.ceil(values * VALUE_STEPS).astype(order.dtype)
    low = xp.zeros_like(budget)  # all drafts above this step fit into the budget
    for bit in reversed(range(VALUE_STEPS.bit_length())):
        higher = low + (1 << bit)
        low = xp.where(xp.sum(steps >= higher) > budget, higher, low)
    share = xp.sum(steps > low, axis=1).astype(order.dtype)
    tied = xp.where(low > 0, xp.sum(steps == low, axis=1).astype(order.dtype), 0)
    left = budget - xp.sum(share)
    return share + xp.clip(left - _before(xp, tied, order), 0, tied)


def rank_of(xp, order: Array) -> Array:
    """Returns int[S]: the place of each slot in `order`, a permutation of slots."""
    at = xp.arange(order.shape[0], dtype=order.dtype)
    return pairs.sums(xp, lambda mine, slot, at: xp.where(slot == mine, at, 0), (at,), (order, at))


def _before(xp, values: Array, order: Array) -> Array:
    """Returns int[S]: the sum of the values of all slots that come before each slot in `order`."""
    rank = rank_of(xp, order)
    return pairs.sums(xp, lambda mine, rank, value: xp.where(rank < mine, value, 0), (rank,), (rank, values))


def counts(
    xp, forced: Array, candidates: Array, values: Array, order: Array, rows: int, heads: int, most: Array | None = None
) -> Array:
    """Returns int[S]: rows of each slot, at most `rows` in all, of which at most `heads` sample.

    `forced` [S]: rows whose input token is settled: 1 for a running slot, more during prefill, 0 for an idle slot.
    `candidates` [S]: rows behind them that verify a prefix. `values` [S, W]: worth of drafts behind those (see
    `value_fill`). `order` [S]: slots, oldest first. heads >= S, so only candidates can be short of heads. `most` [S]: rows that
    a slot in prefill may have; None: any number."""
    running = (forced == 1).astype(forced.dtype)
    prefill = xp.where(forced > 1, forced if most is None else xp.minimum(forced, most), 0)
    left = xp.maximum(rows - xp.sum(running), 0)
    given = xp.clip(left - _before(xp, prefill, order), 0, prefill)
    base = running + given
    whole = (forced > 0) & (base == forced)
    wants = xp.where(whole, candidates, 0)
    budget = xp.maximum(xp.minimum(rows - xp.sum(base), heads - xp.sum(whole.astype(forced.dtype))), 0)
    base = base + level_fill(xp, wants, budget, order, max(1, rows.bit_length()))
    if not values.shape[1]:
        return base
    budget = budget - xp.sum(xp.where(whole, base - forced, 0))
    return base + value_fill(xp, xp.where(whole[:, None], values, 0), budget, order)


def plan(
    xp,
    forced: Array,
    candidates: Array,
    values: Array,
    order: Array,
    *,
    rows: int,
    heads: int,
    places: int | None = None,
    most: Array | None = None,
) -> Plan:
    """Gives `rows` rows to slots, of which `heads` may sample. Every running slot needs a row: rows >= running slots.

    `places`: length of the head arrays; entries behind `heads` stay empty. None: as many as heads. `most`: as in `counts`.
    """
    count = counts(xp, forced, candidates, values, order, rows, heads, most)
    sampling = xp.maximum(count - forced + 1, 0) * (count > 0)
    slot, offset, real = _spread(xp, count, rows)
    head_slot, head_rank, head_real = _spread(xp, sampling, places or heads)
    first = pairs.taken(xp, pairs.running(xp, count) - sampling, head_slot)
    head_row = xp.where(head_real, first + head_rank, 0)
    return Plan(slot, offset, real, count, head_row, head_slot, head_rank, head_real)


def _spread(xp, count: Array, size: int) -> tuple[Array, Array, Array]:
    """Returns, for each of `size` places: its slot, its index within the slot, and whether it is used."""
    end = pairs.running(xp, count)
    place = xp.arange(size, dtype=count.dtype)
    slot = pairs.sums(xp, lambda place, end: place >= end, (place,), (end,))
    real = slot < count.shape[0]
    slot = xp.where(real, slot, count.shape[0] - 1)
    return slot, place - pairs.taken(xp, end - count, slot), real
