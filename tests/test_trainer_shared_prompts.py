"""A prompt once for its group: every rollout reads its own text, trains its own tokens, and has the gradient of flat rows."""

import dataclasses

import gradient_arms as arms
import jax.numpy as jnp
import made_groups
import numpy as np
import pytest
import shared_arms
from hypothesis import given
from hypothesis import strategies as st
from refusals import refused
from shared_arms import SHARED

from jaxrl_post import config
from jaxrl_post.models.model_config import LinearAttention
from jaxrl_post.ring.types import Group, Prompt
from jaxrl_post.trainer import attention, packing, shared_prompts

pytestmark = pytest.mark.usefixtures("quick_compilation")
EXACT, SINGLE, SEEN = 1e-12, 5e-6, 1e-3
GROUPS = [*made_groups.groups(3), *shared_arms.conversations(2)]


def group(prompt, *answers) -> Group:
    """A group from (tokens, which of them are sampled) of each answer."""
    own = Prompt(id="a", tokens=prompt)
    made = [made_groups.rollout(own, i, tokens, sampled=np.array(s, bool)) for i, (tokens, s) in enumerate(answers)]
    return Group(prompt=own, rollouts=tuple(made), rewards=[0] * len(made), scored=[True] * len(made))


def test_a_prompt_by_hand():
    one = group([10, 11, 12], ([1, 2], [1, 1]), ([1], [1]), ([3, 4, 5], [1, 0, 1]))
    made = shared_prompts.together(one.rollouts)
    assert made.tokens.tolist() == [10, 11, 12, 1, 2, 12, 1, 12, 3, 4, 5]
    assert made.positions.tolist() == [0, 1, 2, 3, 4, 2, 3, 2, 3, 4, 5]
    assert made.until.tolist() == [11, 11, 5, 5, 5, 7, 7, 11, 11, 11, 11]
    assert made.owners.tolist() == [0, 0, 0, 0, 0, 1, 1, 2, 2, 2, 2]
    assert [own.tolist() for own in made.columns] == [[3, 4], [6], [8, 9, 10]] and made.flat == 5 + 4 + 6


def test_turns_by_hand():
    """The second continues the first one's answer 1 2, which it was given. The third sampled its own 1."""
    one = group([9], ([1, 2, 7, 3], [1, 1, 0, 1]), ([1, 2, 7, 4], [0, 0, 0, 1]), ([1, 5], [1, 1]))
    made = shared_prompts.together(one.rollouts)
    assert made.tokens.tolist() == [9, 1, 2, 7, 3, 7, 4, 9, 1, 5]
    assert made.until.tolist() == [7, 7, 7, 5, 5, 7, 7, 10, 10, 10]
    assert made.owners.tolist() == [0, 0, 0, 0, 0, 1, 1, 2, 2, 2]
    assert [own.tolist() for own in made.columns] == [[1, 2, 3, 4], [1, 2, 5, 6], [8, 9]]
    places = packing.pack([one], None, rows=1, tokens=16, shared=True)[1]
    assert [tuple(p[1:]) for p in places] == [(0, 0, 1, 4), (0, 0, 1, 2), (0, 0, 5, 2), (0, 0, 8, 2)]


@given(seed=st.integers(0, 10_000), rows=st.integers(1, 4), tokens=st.integers(28, 90))
def test_every_rollout_reads_its_own_text(seed, rows, tokens):
    """What each token sees is its text so far. Every sampled token of every rollout is marked once, where it stands."""
    groups = [*made_groups.groups(2, 3, seed=seed), *shared_arms.conversations(2, seed)]
    batches, places = packing.pack(groups, None, rows=rows, tokens=tokens, shared=True)
    flat, _ = packing.pack(groups, None, rows=rows, tokens=tokens)
    assert len(batches) <= len(flat)
    taken = set()
    for one in (rollout for found in groups for rollout in found.rollouts):
        own = [p for p in places if p.rollout_id == one.id]
        columns = np.concatenate([np.arange(p.start, p.start + p.length) for p in own])
        batch, row = batches[own[0].batch], own[0].row
        whole = np.concatenate([one.prompt.tokens, one.tokens])
        for i, t in enumerate(columns):
            seen = np.flatnonzero((np.arange(tokens) <= t) & (batch.until[row] > t))
            upto = one.prompt.tokens.size + i + 1
            np.testing.assert_array_equal(batch.tokens[row, seen], whole[:upto])
            np.testing.assert_array_equal(batch.positions[row, seen], np.arange(upto))
            assert not one.sampled[i] or seen[-2] == t - 1  # its log-prob is read where the token before stands
        marked = {(own[0].batch, row, int(t)) for t in columns[one.sampled]}
        assert not taken & marked and np.unique(batch.segment_ids[row, columns[one.sampled]]).size == 1
        taken |= marked


def test_leaves_stand_where_tokens_do():
    groups, tokens = GROUPS, 48
    values = {r.id: np.arange(len(r)) + 100.0 * n for n, r in enumerate(r for g in groups for r in g.rollouts)}
    batches, places = packing.pack(groups, None, rows=2, tokens=tokens, given={"old_logprobs": values}, shared=True)
    for name in ("old_logprobs", "rollout_logprobs"):
        found = packing.per_rollout([getattr(b, name) for b in batches], places)
        for one in (rollout for g in groups for rollout in g.rollouts):
            expected = values[one.id] if name == "old_logprobs" else one.logprobs
            np.testing.assert_allclose(found[one.id][one.sampled], expected[one.sampled], rtol=1e-6)
    padding = np.concatenate([b.segment_ids for b in batches]) == 0
    until = np.concatenate([b.until for b in batches])
    assert (until == np.arange(1, tokens + 1))[padding].all()  # sees itself alone


def test_a_group_longer_than_a_row_is_cut():
    one = group(np.arange(20), *(([1] * 10, [1] * 10),) * 4)
    batches, _ = packing.pack([one], None, rows=1, tokens=45, shared=True)
    assert [int((b.segment_ids > 0).sum()) for b in batches] == [41, 41]  # 19 + 2 x 11 tokens each, for 30 x 4


@pytest.fixture(scope="module")
def expected():
    return arms.plain_gradient(GROUPS, np.float64, mode="seq-mean-token-mean")


MODE = dict(mode="seq-mean-token-mean")
ARMS = {
    "one": dict(),
    "small_rows": dict(rows=2, tokens=30),
    "scanned_on_eight_devices": dict(sizes=(2, 2, 2), scan_layers="yes", remat=True),
    "three_accumulates": dict(parts=3),
}
EXTENDED = [pytest.param(name, marks=pytest.mark.extended) for name in ARMS if name != "one"]


@pytest.mark.parametrize("arm", ["one", *EXTENDED])
def test_the_gradient_of_plain_code(expected, arm):
    assert arms.worst(arms.gradient(GROUPS, np.float64, **MODE, **SHARED, **ARMS[arm]), expected) <= EXACT


@pytest.mark.parametrize(
    "name", ["sinks", *(pytest.param(n, marks=pytest.mark.extended) for n in ("windows", "experts"))]
)
def test_the_gradient_of_flat_rows(name):
    flat, shared = (
        arms.gradient(GROUPS, np.float64, model=shared_arms.MODELS[name], **MODE, **how) for how in ({}, SHARED)
    )
    assert arms.worst(shared, flat) <= EXACT


@pytest.mark.extended
def test_saved_tokens_are_counted_and_log_probs_are_those_of_flat_rows():
    flat, shared = (arms.learner(reference=False, given=config.AlgorithmConfig(), **how) for how in ({}, SHARED))
    old, new = (one.logprobs(GROUPS) for one in (flat, shared))
    for group in GROUPS:
        for one in group.rollouts:
            np.testing.assert_allclose(new[one.id][one.sampled], old[one.id][one.sampled], atol=1e-5)
    metrics = arms.turn(shared, GROUPS)
    batches, _ = packing.pack(GROUPS, None, rows=4, tokens=48, shared=True)
    whole = sum(r.prompt.tokens.size + len(r) for g in GROUPS for r in g.rollouts)
    assert metrics["training/shared_tokens"] == whole - sum(int((b.segment_ids > 0).sum()) for b in batches) > 40
    assert "training/shared_tokens" not in arms.turn(flat, GROUPS)


# ---- planted faults


def leaking(monkeypatch):
    """Every branch sees the ones before it."""
    right = attention.packed
    monkeypatch.setattr(
        attention,
        "packed",
        lambda texts, *rest: right(texts._replace(until=jnp.full_like(texts.until, 1 << 20)), *rest),
    )


def unaware(monkeypatch):
    """Branches see themselves and not their prompt."""
    right = packing.pack

    def wrong(*given, **how):
        batches, places = right(*given, **how)
        cut = [
            np.where(np.arange(b.until.shape[1]) + 1 == b.until, b.until, np.arange(b.until.shape[1]) + 2)
            for b in batches
        ]
        return [dataclasses.replace(b, until=u.astype(np.int32)) for b, u in zip(batches, cut, strict=True)], places

    monkeypatch.setattr(packing, "pack", wrong)


def by_place(monkeypatch):
    """Positions count on along the row."""
    right = shared_prompts.together
    monkeypatch.setattr(
        shared_prompts, "together", lambda some: dataclasses.replace(right(some), positions=np.arange(len(right(some))))
    )


def copies_in_any_order(monkeypatch):
    """The copy of a sampled token does not stand behind the token before it."""
    right = shared_prompts._continued
    monkeypatch.setattr(shared_prompts, "_continued", lambda *given: right(*given)[::-1])


def taken_by_two(monkeypatch):
    """Two rollouts that sampled equal tokens share them, and one of the two trains them."""
    right = shared_prompts.together

    def wrong(rollouts):
        sampled = dataclasses.replace(rollouts[0], sampled=np.zeros(len(rollouts[0]), bool))
        return dataclasses.replace(right((sampled, *rollouts[1:])), rollouts=tuple(rollouts))

    monkeypatch.setattr(shared_prompts, "together", wrong)


FAULTS = [leaking, unaware, by_place, copies_in_any_order, taken_by_two]


@pytest.mark.extended
@pytest.mark.parametrize("fault", FAULTS)
def test_planted_faults_are_found(expected, monkeypatch, fault):
    fault(monkeypatch)
    assert arms.worst(arms.gradient(GROUPS, np.float64, **MODE, **SHARED), expected) >= SEEN


# ---- what is refused


def test_layers_with_a_state_are_refused():
    model = dataclasses.replace(made_groups.MODEL, linear=LinearAttention(2, 2, 4, 4, 4, (0,)))
    refused("layer 0 hands on a recurrent state; the nearest valid value is False", arms.learner, model=model, **SHARED)


@pytest.mark.parametrize("name", ["neftune_alpha", "router_aux_loss_coef"])
def test_what_differs_by_rollout_is_refused(name):
    given = config.default()
    refused(
        f"algorithm.{name}=0.5 .* batch.shared_prompts=True",
        config.resolve,
        given,
        ["model.preset=tiny", "batch.shared_prompts=true", f"algorithm.{name}=0.5"],
    )
