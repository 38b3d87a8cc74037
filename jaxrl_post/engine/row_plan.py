"""How the R rows of one step are given to slots: array code over numpy or jax.numpy, which the caller passes as `xp`.

Order of service: one row for every running slot; then prefill rows, oldest slot first, while rows are left; then rows of a
prefix that is verified, shared out evenly up to what each slot wants; then draft rows, the most valuable first. A slot whose
forced rows were cut gets no candidate row. Invariant: the plan decides when a position is computed, never what it gives.
"""

from __future__ import annotations

from typing import Any, NamedTuple

Array = Any
VALUE_STEPS = 1 << 12


class Plan(NamedTuple):
    """Rows sorted by slot. `slot`, `offset` (position minus the slot's first), `real`: [R]. `count`: rows of each slot [S].
    Heads, the rows that sample, are compacted to a fixed number: `head_row` (index of the row), `head_slot`,
    `head_rank` (0 for a slot's first head), `head_real`: [places]."""

    slot: Array
    offset: Array
    real: Array
    count: Array
    head_row: Array
    head_slot: Array
    head_rank: Array
    head_real: Array


def level_fill(xp, wants: Array, budget: Array, order: Array, rounds: int) -> Array:
    """int[S]: shares of `budget` as even as possible, none above its want; the odd ones go to the first in `order`.

    `rounds`: bits of the largest level that can matter."""
    level = xp.zeros_like(budget)
    for bit in reversed(range(rounds)):
        higher = level + (1 << bit)
        level = xp.where(xp.sum(xp.minimum(wants, higher)) <= budget, higher, level)
    share = xp.minimum(wants, level)
    more = (wants > level).astype(share.dtype)[order]
    left = budget - xp.sum(share)
    odd = xp.where(xp.cumsum(more) <= left, more, 0)
    return share + odd[rank_of(xp, order)]


def value_fill(xp, values: Array, budget: Array, order: Array) -> Array:
    """int[S]: draft rows of each slot, `budget` in all or fewer: those of the highest `values` f32[S, W], each the chance that
    the slot's drafts up to this one prove right, by the weight of the slot (not rising along W), 0 for none. Compared in steps
    of 2^-12; ties go to the first slot in `order`."""
    steps = xp.ceil(values * VALUE_STEPS).astype(order.dtype)
    low = xp.zeros_like(budget)  # the lowest step of which all may have a row lies above it
    for bit in reversed(range(VALUE_STEPS.bit_length())):
        higher = low + (1 << bit)
        low = xp.where(xp.sum(steps >= higher) > budget, higher, low)
    share = xp.sum(steps > low, axis=1).astype(order.dtype)
    tied = xp.where(low > 0, xp.sum(steps == low, axis=1).astype(order.dtype), 0)[order]
    left = budget - xp.sum(share)
    before = xp.cumsum(tied) - tied
    return share + xp.clip(left - before, 0, tied)[rank_of(xp, order)]


def rank_of(xp, order: Array) -> Array:
    """int[S]: the place of each slot in `order`, a permutation of slots."""
    return xp.argsort(order)


def counts(xp, forced: Array, candidates: Array, values: Array, order: Array, rows: int, heads: int) -> Array:
    """int[S]: rows of each slot. `forced` [S]: rows whose input token is settled (1 for a running slot, more while
    prefilling, 0 for an idle one); `candidates` [S]: rows behind them that verify a prefix; `values` [S, W]: what drafts
    behind them are worth (see `value_fill`); `order` [S]: slots, oldest first.

    At most `rows` in all, and at most `heads` of them sample (heads >= S, so only candidates can be short of heads)."""
    running = (forced == 1).astype(forced.dtype)
    prefill = xp.where(forced > 1, forced, 0)
    left = xp.maximum(rows - xp.sum(running), 0)
    before = xp.cumsum(prefill[order]) - prefill[order]
    given = xp.clip(left - before, 0, prefill[order])[rank_of(xp, order)]
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
) -> Plan:
    """Gives `rows` rows to slots, of which `heads` may sample. Every running slot needs a row: rows >= running slots.

    `places`: length of the head arrays; entries behind `heads` stay empty. None: as many as heads.
    """
    count = counts(xp, forced, candidates, values, order, rows, heads)
    sampling = xp.maximum(count - forced + 1, 0) * (count > 0)
    slot, offset, real = _spread(xp, count, rows)
    head_slot, head_rank, head_real = _spread(xp, sampling, places or heads)
    end = xp.cumsum(count)[head_slot]
    head_row = xp.where(head_real, end - sampling[head_slot] + head_rank, 0)
    return Plan(slot, offset, real, count, head_row, head_slot, head_rank, head_real)


def _spread(xp, count: Array, size: int) -> tuple[Array, Array, Array]:
    """For each of `size` places: the slot it falls to, its index within that slot, and whether it is taken."""
    end = xp.cumsum(count)
    place = xp.arange(size, dtype=count.dtype)
    slot = xp.sum((place[:, None] >= end[None, :]).astype(count.dtype), axis=1)
    real = slot < count.shape[0]
    slot = xp.where(real, slot, count.shape[0] - 1)
    return slot, place - (end - count)[slot], real
