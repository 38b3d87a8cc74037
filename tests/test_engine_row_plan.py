"""The row plan against its rules, written out slot by slot, and jax.numpy against numpy."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxrl_post.engine import row_plan


@st.composite
def cases(draw, sizes=None):
    """`sizes`: (slots, rows, heads, width), from where they are given."""
    slots = sizes[0] if sizes else draw(st.integers(1, 9))
    forced = draw(st.lists(st.sampled_from([0, 1, 1, 1, 2, 5, 17]), min_size=slots, max_size=slots))
    guesses = [draw(st.integers(0, 12)) * (f > 0) for f in forced]
    rows = sizes[1] if sizes else draw(st.integers(slots, 40))
    heads = sizes[2] if sizes else draw(st.integers(slots, rows))
    width = sizes[3] if sizes else draw(st.integers(0, 4))
    steps = draw(st.lists(st.integers(0, 6), min_size=slots * width, max_size=slots * width))
    values = -np.sort(-np.array(steps, np.float32).reshape(slots, width), axis=1) / 4096
    values[np.array(guesses) > 0] = 0  # a slot verifies a prefix or drafts
    return (
        np.array(forced, np.int32),
        np.array(guesses, np.int32),
        values,
        np.array(draw(st.permutations(range(slots))), np.int32),
        rows,
        heads,
    )


def by_hand(forced, guesses, values, order, rows, heads):
    """Returns the rows of each slot, given out one at a time."""
    count = np.where(forced == 1, 1, 0)
    left = rows - count.sum()
    for s in order:
        if forced[s] > 1:
            count[s] = min(forced[s], left)
            left -= count[s]
    whole = [s for s in order if forced[s] > 0 and count[s] == forced[s]]
    free_heads = heads - len(whole)
    extra = dict.fromkeys(whole, 0)
    while left > 0 and free_heads > 0 and any(extra[s] < guesses[s] for s in whole):
        lowest = min(extra[s] for s in whole if extra[s] < guesses[s])
        s = next(s for s in whole if extra[s] == lowest and extra[s] < guesses[s])
        extra[s] += 1
        left, free_heads = left - 1, free_heads - 1
    for s in whole:
        count[s] += extra[s]
    drafts = dict.fromkeys(whole, 0)
    while left > 0 and free_heads > 0:
        best = [(values[s, drafts[s]], -whole.index(s)) for s in whole if drafts[s] < values.shape[1]]
        if not best or max(best)[0] == 0:
            break
        s = whole[-max(best)[1]]
        drafts[s] += 1
        left, free_heads = left - 1, free_heads - 1
    for s in whole:
        count[s] += drafts[s]
    return count


@settings(max_examples=300, deadline=None)
@given(cases())
def test_counts_equal_the_rules_by_hand(case):
    forced, guesses, values, order, rows, heads = case
    plan = row_plan.plan(np, forced, guesses, values, order, rows=rows, heads=heads)
    want = by_hand(forced, guesses, values, order, rows, heads)
    assert plan.count.tolist() == want.tolist()
    flat = [(s, o) for s in range(forced.size) for o in range(want[s])]
    assert [(s, o) for s, o, real in zip(plan.slot, plan.offset, plan.real) if real] == flat
    sampling = [i for i, (s, o) in enumerate(flat) if o >= forced[s] - 1]
    assert plan.head_row[plan.head_real].tolist() == sampling
    assert plan.head_slot[plan.head_real].tolist() == [flat[i][0] for i in sampling]
    assert plan.head_rank[plan.head_real].tolist() == [flat[i][1] - forced[flat[i][0]] + 1 for i in sampling]


SIZES = ((9, 40, 40, 4), (9, 23, 11, 2), (5, 30, 6, 0), (1, 3, 2, 1))  # a compilation each, not one for every example
jitted = functools.cache(lambda rows, heads: jax.jit(functools.partial(row_plan.plan, jnp, rows=rows, heads=heads)))


@settings(max_examples=100, deadline=None)
@given(st.sampled_from(SIZES).flatmap(cases))
def test_jax_and_numpy_agree(case):
    forced, guesses, values, order, rows, heads = case
    a = row_plan.plan(np, forced, guesses, values, order, rows=rows, heads=heads)
    b = jitted(rows, heads)(forced, guesses, values, order)
    for name, x, y in zip(a._fields, a, b):
        assert np.array_equal(x, y), name


def test_values_of_one_and_below_a_step():
    """Three certain drafts for two rows; a chance below a step of 2^-12 is above none; half a step more wins."""
    first = np.arange(3, dtype=np.int32)
    certain = np.ones((3, 1), np.float32)
    assert row_plan.value_fill(np, certain, np.int32(2), first).tolist() == [1, 1, 0]
    assert row_plan.value_fill(np, certain, np.int32(2), first[::-1]).tolist() == [0, 1, 1]
    little = np.array([[0.0], [0.4], [0.0]], np.float32) / 4096
    assert row_plan.value_fill(np, little, np.int32(2), first).tolist() == [0, 1, 0]
    more = np.array([[2.0], [2.5], [1.5]], np.float32) / 4096
    assert row_plan.value_fill(np, more, np.int32(1), first).tolist() == [0, 1, 0]
    assert row_plan.value_fill(np, more, np.int32(2), first).tolist() == [1, 1, 0]


def test_one_slot_may_have_every_row():
    """The level of an even share reaches as high as there are rows: 1 + 6 of 7, and 1 + 62 of 63."""
    for rows in (7, 63):
        one, none = np.ones(1, np.int32), np.zeros((1, 0), np.float32)
        found = row_plan.counts(np, one, one * 99, none, one * 0, rows, rows)
        assert found.tolist() == [rows]
