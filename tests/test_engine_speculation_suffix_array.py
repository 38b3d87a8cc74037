"""Suffix arrays against sorted lists of suffixes; priorities by hand."""

from __future__ import annotations

import time

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxrl_post.engine.speculation import suffix_array


@given(pool=st.lists(st.integers(-1, 2), max_size=120))
def test_suffixes_are_sorted_by_their_first_32_tokens(pool):
    expected = sorted(range(len(pool)), key=lambda i: (pool[i : i + 32], i))
    assert suffix_array.sort(np.array(pool, np.int32)).tolist() == expected


def test_the_depth_is_exactly_32():
    """Two suffixes that differ first in their 33rd token keep their order; those that differ in the 32nd are sorted."""
    for same, expected in ((32, [0, 34]), (31, [34, 0])):
        pool = np.array([*[5] * same, 9, *[-1] * (33 - same), *[5] * same, 7], np.int32)
        order = suffix_array.sort(pool).tolist()
        assert sorted([0, 34], key=order.index) == expected


def test_a_pool_is_prompt_end_answer_separator():
    built = suffix_array.build(
        [np.array([5, 6], np.int32), np.array([7], np.int32)], np.arange(10, 20), np.array([1, 16])
    )
    assert built.pool.tolist() == [*range(13, 20), 5, 6, -1, *range(13, 20), 7, -1]
    assert built.priority.tolist() == np.cumsum(np.repeat([1.0, 16.0], [10, 9])[built.order]).tolist()
    assert sum(x.nbytes for x in built) == 12 * 19 and {x.dtype.itemsize for x in built} == {4}
    assert all(x.size == 0 for x in suffix_array.build([], np.arange(3)))


def test_priorities_go_from_the_lowest_reward_to_the_highest():
    scored = np.array([True, True, True, False])
    assert suffix_array.priorities(np.array([-1.0, 0.0, 1.0, 9.0], np.float32), scored).tolist() == [1, 9, 16, 1]
    assert suffix_array.priorities(np.ones(4, np.float32), scored).tolist() == [1] * 4
    assert suffix_array.priorities(np.ones(2, np.float32), np.zeros(2, bool)).tolist() == [1, 1]


@pytest.mark.parametrize("rewards, branch", [([1, 0, 0], 8), ([0, 0, 1], 9), ([0, 0, 0], 8)])
def test_the_weighted_middle_lies_in_the_branch_of_the_rewards(rewards, branch):
    """After 7: 8 in two rollouts and 9 in one. The single rollout wins when it alone was rewarded."""
    weights = suffix_array.priorities(np.array(rewards, np.float32), np.ones(3, bool))
    built = suffix_array.build([np.array([7, t], np.int32) for t in (8, 8, 9)], np.zeros(0), weights)
    mine = [i for i, start in enumerate(built.order) if built.pool[start] == 7]
    low, high = built.priority[mine[0] - 1], built.priority[mine[-1]]
    middle = next(i for i in mine if built.priority[i] >= (low + high) / 2)
    assert built.pool[built.order[middle] + 1] == branch


def test_sums_of_priorities_are_exact_and_a_large_pool_sorts_at_once():
    noise = np.random.default_rng(0)
    answers = [noise.integers(0, 3000, 1 << 14).astype(np.int32) for _ in range(8)]
    start = time.process_time()
    built = suffix_array.build(answers, np.arange(9), np.full(8, 16))
    assert time.process_time() - start < 3.0  # measured 0.1 s
    assert built.priority[-1] == 16 * built.pool.size
    assert np.array_equal(np.diff(built.priority), np.full(built.pool.size - 1, 16))
    odd = suffix_array.build(answers, np.arange(9), np.full(8, 1023))  # as far as 2^23 tokens of the highest reward
    assert np.array_equal(np.diff(odd.priority), np.full(odd.pool.size - 1, 1023))


def test_more_tokens_than_sums_can_count_are_refused(monkeypatch):
    monkeypatch.setattr(suffix_array, "MOST", 8)
    with pytest.raises(ValueError, match="1 rollouts of a prompt have 9 tokens, at most 8"):
        suffix_array.build([np.arange(5, dtype=np.int32)], np.arange(3))
