"""Packing: every token lands once, with what belongs to it, and nothing else is marked."""

import dataclasses

import made_groups
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from refusals import refused

from jaxrl_post.algorithms.credit import Credit
from jaxrl_post.ring.types import Finish, Group, Prompt
from jaxrl_post.trainer import packing


def credits(groups, values, weight=1.0, count=1, correction=None):
    """The same value at every token of a rollout; an unscored one weighs nothing."""
    return {
        r.id: Credit(
            advantages=np.full(len(r), float(value)),
            weight=weight * bool(scored),
            count=count * bool(scored),
            correction=correction,
            reward=0.0,
        )
        for group, owned in zip(groups, values, strict=True)
        for r, value, scored in zip(group.rollouts, owned, group.scored, strict=True)
    }


def tiny():
    """Two prompts of 2 and 1 tokens; answers of 3, 1, 2, 2 tokens: sequences of 5, 3, 3, 3 tokens."""
    a, b = Prompt(id="a", tokens=[10, 11]), Prompt(id="b", tokens=[20])
    first = Group(
        prompt=a,
        rewards=[1, 0],
        scored=[True, True],
        rollouts=(
            made_groups.rollout(a, 0, [1, 2, 3], logprobs=[-0.1, -0.2, -0.3], version=4, sampled=[True, False, True]),
            made_groups.rollout(a, 1, [4], logprobs=[-0.4], version=5),
        ),
    )
    second = Group(
        prompt=b,
        rewards=[1, 0],
        scored=[False, True],
        rollouts=(
            made_groups.rollout(b, 0, [5, 6], logprobs=[-0.5, -0.6], version=5),
            made_groups.rollout(b, 1, [7, 8], logprobs=[-0.7, -0.8], version=5),
        ),
    )
    return [first, second]


def test_by_hand():
    groups = tiny()
    old = {r.id: np.arange(len(r)) + 10.0 * n for n, r in enumerate(r for g in groups for r in g.rollouts)}
    worth = credits(groups, [[0.5, -0.5], [7.0, 2.0]], weight=0.25, count=3)
    batches, places = packing.pack(groups, worth, rows=2, tokens=8, given={"old_logprobs": old})
    assert len(batches) == 1
    b = batches[0]
    np.testing.assert_array_equal(b.tokens, [[10, 11, 1, 2, 3, 10, 11, 4], [20, 5, 6, 20, 7, 8, 0, 0]])
    np.testing.assert_array_equal(b.positions, [[0, 1, 2, 3, 4, 0, 1, 2], [0, 1, 2, 0, 1, 2, 0, 0]])
    np.testing.assert_array_equal(b.segment_ids, [[1, 1, 1, 1, 1, 2, 2, 2], [1, 1, 1, 2, 2, 2, 0, 0]])
    np.testing.assert_array_equal(b.loss_mask, np.array([[0, 0, 1, 0, 1, 0, 0, 1], [0, 0, 0, 0, 1, 1, 0, 0]], bool))
    np.testing.assert_array_equal(b.advantages, [[0, 0, 0.5, 0, 0.5, 0, 0, -0.5], [0, 0, 0, 0, 2, 2, 0, 0]])
    np.testing.assert_array_equal(b.loss_weights, 0.25 * b.loss_mask)
    np.testing.assert_array_equal(b.loss_counts, [[0, 0, 3, 0, 0, 0, 0, 3], [0, 0, 0, 0, 3, 0, 0, 0]])
    np.testing.assert_allclose(
        b.rollout_logprobs, [[0, 0, -0.1, 0, -0.3, 0, 0, -0.4], [0, -0.5, -0.6, 0, -0.7, -0.8, 0, 0]]
    )
    np.testing.assert_array_equal(b.old_logprobs, [[0, 0, 0, 0, 2, 0, 0, 10], [0, 20, 21, 0, 30, 31, 0, 0]])
    assert b.ref_logprobs is None and b.returns is None and b.values is None and b.corrections is None
    assert [tuple(p[1:]) for p in places] == [(0, 0, 2, 3), (0, 0, 7, 1), (0, 1, 1, 2), (0, 1, 4, 2)]
    assert packing.per_rollout([b.tokens], places)[places[0].rollout_id].tolist() == [1, 2, 3]


@given(lengths=st.lists(st.integers(1, 16), max_size=40))
def test_first_fit_decreasing(lengths):
    row, start, rows = packing.place(np.array(lengths, int), 16)
    used = [[] for _ in range(rows)]
    for n in sorted(range(len(lengths)), key=lambda n: (-lengths[n], n)):  # the rule, brute force
        fit = next(r for r in range(rows + 1) if r == rows or sum(used[r]) + lengths[n] <= 16)
        assert (row[n], start[n]) == (fit, sum(used[fit]))
        used[fit].append(lengths[n])
    assert all(used)


@given(seed=st.integers(0, 10_000), rows=st.integers(1, 5), tokens=st.integers(26, 64))
def test_every_token_lands_once_and_comes_back(seed, rows, tokens):
    groups = made_groups.groups(4, 3, seed=seed)
    rng = np.random.default_rng(seed)
    advantages = [rng.normal(size=3) for _ in groups]
    batches, places = packing.pack(groups, credits(groups, advantages), rows=rows, tokens=tokens)
    assert all(leaf.shape == (rows, tokens) for b in batches for leaf in (b.tokens, b.loss_mask, b.advantages))
    back = {
        name: packing.per_rollout([getattr(b, name) for b in batches], places)
        for name in ("tokens", "loss_mask", "advantages", "rollout_logprobs", "positions", "segment_ids")
    }
    for g, group in enumerate(groups):
        for i, rollout in enumerate(group.rollouts):
            live = rollout.sampled & group.scored[i]
            np.testing.assert_array_equal(back["tokens"][rollout.id], rollout.tokens)
            np.testing.assert_array_equal(back["loss_mask"][rollout.id], live)
            np.testing.assert_array_equal(back["advantages"][rollout.id], np.float32(live * advantages[g][i]))
            np.testing.assert_array_equal(back["rollout_logprobs"][rollout.id], rollout.sampled * rollout.logprobs)
            start = group.prompt.tokens.size
            np.testing.assert_array_equal(back["positions"][rollout.id], start + np.arange(len(rollout)))
            assert np.unique(back["segment_ids"][rollout.id]).size == 1
    whole = sum(r.prompt.tokens.size + len(r) for g in groups for r in g.rollouts)
    assert sum((b.segment_ids > 0).sum() for b in batches) == whole
    assert sum(b.loss_mask.sum() for b in batches) == sum(
        (r.sampled & s).sum() for g in groups for r, s in zip(g.rollouts, g.scored, strict=True)
    )


def test_same_input_same_bytes():
    groups = made_groups.groups()
    values = credits(groups, [np.ones(4)] * 5)
    one, two = (packing.pack(groups, values, rows=3, tokens=40)[0] for _ in range(2))
    for a, b in zip(one, two, strict=True):
        assert a.tokens.tobytes() == b.tokens.tobytes() and a.segment_ids.tobytes() == b.segment_ids.tobytes()


def test_too_long_is_refused_with_the_length_that_would_do():
    groups = tiny()
    with pytest.raises(
        ValueError,
        match=r"batch.tokens=4 cannot hold rollout .*'a', 0.*5 tokens; the nearest valid "
        r"value is 5",
    ):
        packing.pack(groups, None, rows=2, tokens=4)


@pytest.mark.parametrize("finish", [Finish.PARKED])
def test_unfinished_rollouts_are_refused(finish):
    prompt = Prompt(id="a", tokens=[1])
    rollout = made_groups.rollout(prompt, 0, [1], finish=finish)
    group = Group(prompt=prompt, rollouts=(rollout,), rewards=[0], scored=[True])
    refused(f"is {finish.name}; only finished ones", packing.pack, [group], None, rows=1, tokens=4)


def test_no_groups_no_batches():
    assert packing.pack([], {}, rows=2, tokens=8) == ([], [])


def test_without_credits_nothing_is_marked_and_corrections_lie_at_their_tokens():
    groups = tiny()
    read, _ = packing.pack(groups, None, rows=2, tokens=8)
    assert not read[0].loss_mask.any() and not read[0].loss_counts.any() and read[0].tokens.any()
    worth = credits(groups, [[1, 1], [1, 1]])
    worth = {
        name: dataclasses.replace(own, correction=np.arange(own.advantages.size) + 5.0) for name, own in worth.items()
    }
    b = packing.pack(groups, worth, rows=2, tokens=8, leaves=["corrections"])[0][0]
    np.testing.assert_array_equal(b.corrections, [[0, 0, 5, 0, 7, 0, 0, 5], [0, 0, 0, 0, 5, 6, 0, 0]])
    blank = packing.blank(2, 8, np.float32, ["corrections"])
    assert blank.corrections.shape == (2, 8) and blank.old_logprobs is None
