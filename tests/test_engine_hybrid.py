"""The promise for models with a recurrent state: no fast path of the engine changes a bit of a rollout."""

from __future__ import annotations

import dataclasses

import engine_lab as lab
import jax
import numpy as np
import pytest

from jaxrl_post.engine import prompt_program, recurrent_rows, row_plan
from jaxrl_post.engine.host.slot_table import SlotTable
from jaxrl_post.models.model_config import LinearAttention
from jaxrl_post.parallel import mesh as meshes

HYBRID = dataclasses.replace(
    lab.TINY,
    layers=3,
    windows=(),
    experts=None,
    qk_norm=True,
    attn_gate=True,
    rotary_dim=4,
    norm_offset=1.0,
    linear=LinearAttention(key_heads=2, value_heads=4, key_dim=8, value_dim=8, width=4, layers=(0, 1)),
)
ASKED = lab.requests(40)


def engine(seed: int = 0, **changes):
    return lab.engine(lab.weights(seed, HYBRID), HYBRID, **changes)


@pytest.fixture(scope="module")
def shared():
    return engine()


def fresh(one):
    """An engine without requests, whose slots hold what others left there."""
    one.reset()
    return one


@pytest.fixture(scope="module")
def plain(shared):
    return lab.run(fresh(shared), ASKED)


def test_a_hybrid_agrees_with_the_independent_sampler(plain):
    some = ASKED[::2]
    assert sum(len(plain[r.rollout_id]) for r in some) > 250
    assert lab.against_sampler(plain, some, lab.weights(0, HYBRID), HYBRID) == []


def test_samples_of_a_prompt_copy_the_state_behind_it(shared, plain):
    """Alone, each computes its prompt from the first token on."""
    shared.metrics()
    alone = [
        dataclasses.replace(r, prompt=dataclasses.replace(r.prompt, id=str(at))) for at, r in enumerate(ASKED[::-1])
    ]
    assert lab.same_bits(plain, lab.run(fresh(shared), alone))
    rows = shared.metrics()["rows/prefill"]
    assert rows == sum(r.prompt.tokens.size - 1 for r in ASKED)
    lab.run(fresh(shared), ASKED)
    told = shared.metrics()
    assert told["rows/prefill"] < 0.5 * rows and told["sched/copied_states"] >= 20


@pytest.mark.parametrize("verifies", [True, False])
def test_two_devices_share_the_heads_of_states_and_pages(verifies):
    one = engine(mesh=meshes.make_mesh(tensor=2), verifies=verifies)
    out = lab.run(one, ASKED[:16])
    assert lab.against_sampler(out, ASKED[:16], lab.weights(0, HYBRID), HYBRID) == []


def test_order_lengths_of_dispatches_and_preemption_change_nothing(shared, plain):
    noise = np.random.default_rng(1)
    order = noise.permutation(len(ASKED))
    out = lab.run(fresh(shared), [ASKED[i] for i in order], submit_at=noise.integers(0, 12, len(ASKED)).tolist())
    assert lab.same_bits(plain, out)
    assert lab.same_bits(plain, lab.run(engine(steps_per_dispatch=1), ASKED))
    tight = engine(pages=12)
    assert lab.same_bits(plain, lab.run(tight, ASKED))
    assert tight.metrics()["sched/preemptions"] >= 10


@pytest.mark.parametrize("mode", ["recompute", "verify", "restart"])
def test_parking_changes_nothing(shared, plain, mode):
    out, parks = lab.park_and_resume(fresh(shared), ASKED, mode=mode)
    assert parks >= 20 and lab.same_bits(plain, out)


def test_candidates_change_nothing(shared, plain):
    noise = np.random.default_rng(2)
    right = {r.rollout_id: plain[r.rollout_id].tokens for r in ASKED}
    mixed = {name: np.where(noise.random(t.size) < 0.8, t, noise.integers(0, 40, t.size)) for name, t in right.items()}
    shared.metrics()
    for guesses, least in ((right, 400), (mixed, 40)):
        out = lab.run(fresh(shared), [lab.with_guesses(r, guesses[r.rollout_id]) for r in ASKED])
        assert lab.same_bits(plain, out)
        assert shared.metrics()["rows/draft_accepted"] > least


def test_without_proposals_a_state_keeps_no_rows_and_nothing_changes(plain):
    one = engine(verifies=False)
    states = [layer for layer in one.device.state.cache if isinstance(layer, recurrent_rows.Recurrent)]
    assert [part.size for layer in states for part in jax.tree.leaves((layer.pending, layer.inputs))] == [0] * 14
    out = lab.run(one, [lab.with_guesses(r, plain[r.rollout_id].tokens) for r in ASKED])
    assert lab.same_bits(plain, out) and one.metrics().get("rows/draft_accepted", 0) == 0


def drafts(plain, clones: bool):
    return lab.drafting("ours", lab.groups_of(ASKED, plain, vary=0.2), clones=clones)


@pytest.mark.parametrize("clones", [False, True])
def test_drafts_of_a_hybrid_change_nothing(plain, clones):
    one = engine(drafting=drafts(plain, clones), pages=48)
    out = lab.run(one, ASKED)
    told = one.metrics()
    assert lab.same_bits(plain, out)
    assert told["rows/draft_accepted"] > 100 and told["rows/draft_rejected"] > 50


def test_a_swap_that_keeps_continues_from_the_old_states():
    config = dataclasses.replace(lab.TINY, layers=3, windows=(), experts=None, linear=HYBRID.linear)
    weights = {seed: lab.weights(seed, config) for seed in (0, 1)}
    one = lab.engine(weights[0], config)
    placed = meshes.put(weights[1], jax.tree.map(lambda x: x.sharding, one.device.params))
    asked = lab.requests(16, samples=4, seed=9, longest=40)
    out = lab.swap_in_mid_generation(one, asked, placed, steps=3, mode="keep")
    mixed = [r for r in asked if set(out[r.rollout_id].versions.tolist()) == {0, 1}]
    assert len(mixed) >= 3
    told = [lab.kept_across_swaps(out[r.rollout_id], r, weights, config) for r in mixed]
    assert [one for one in told if one] == []


# ---- prompts in the wide program, as a key of its own

LONG = lab.requests(24, longest_prompt=150, longest=24, seed=3)


def wide(**changes):
    return engine(**dict(max_length=200, pages=16 * 13, prompt_rows=256) | changes)


@pytest.fixture(scope="module")
def passes():
    return wide()


@pytest.fixture(scope="module")
def by_passes(passes):
    return lab.run(fresh(passes), LONG)


def test_wide_prompts_agree_with_the_independent_sampler(passes, by_passes):
    assert lab.against_sampler(by_passes, LONG[::2], lab.weights(0, HYBRID), HYBRID) == []


def test_samples_copy_the_state_that_a_pass_left_behind_a_prompt(passes, by_passes):
    passes.metrics()
    assert lab.same_bits({r.rollout_id: by_passes[r.rollout_id] for r in LONG[:8]}, lab.run(fresh(passes), LONG[:8]))
    told = passes.metrics()
    assert told["rows/prefill"] == sum(r.prompt.tokens.size - 1 for r in LONG[:8:4])
    assert told["sched/copied_states"] == 6


SHUFFLED = [LONG[i] for i in np.random.default_rng(1).permutation(len(LONG))]


def test_the_place_of_a_wide_prompt_changes_nothing(passes, by_passes):
    out = lab.run(fresh(passes), SHUFFLED, submit_at=[0, 0, 3] * 8)
    assert lab.same_bits(by_passes, out)
    tight = wide(pages=13)
    assert lab.same_bits(by_passes, lab.run(tight, LONG)) and tight.metrics()["sched/preemptions"] >= 1


def test_a_wide_prompt_goes_on_in_the_next_piece_of_a_pass(monkeypatch):
    monkeypatch.setattr(prompt_program, "PIECE", 128)
    one = wide()
    out = lab.run(one, LONG)
    assert lab.against_sampler(out, LONG[::4], lab.weights(0, HYBRID), HYBRID) == []
    assert lab.same_bits(out, lab.run(fresh(one), SHUFFLED, submit_at=[0, 0, 3] * 8))


@pytest.mark.parametrize("sizes", [{"tensor": 2}, {"data": 2}], ids=str)
def test_wide_prompts_on_two_devices(sizes):
    asked = lab.requests(8, longest_prompt=90, longest=8, replicas=sizes.get("data", 1))
    out = lab.run(wide(mesh=meshes.make_mesh(**sizes), prompt_rows=128), asked)
    assert lab.against_sampler(out, asked, lab.weights(0, HYBRID), HYBRID) == []


def test_the_rows_of_tiles_by_slot():
    """Slot 3 has two tiles, slot 1 begins, slot 0 has no rows, and the last tile is empty."""
    tiles = np.array([[3, 64, 64], [3, 128, 10], [1, 0, 64], [0, 0, 0]], np.int32)
    found = prompt_program.rows_of_tiles(jax.numpy.asarray(tiles), 4)
    assert [list(map(int, one)) for one in found] == [[0, 128, 0, 0], [0, 0, 0, 64], [0, 64, 0, 74], [0, 64, 0, 74]]


# ---- planted faults: each breaks one of the equalities above


def one_more_row_is_committed(monkeypatch):
    real = recurrent_rows.slot_rows
    monkeypatch.setattr(recurrent_rows, "slot_rows", lambda position, count, forced: real(position, count, forced + 1))


def one_row_less_is_accepted(monkeypatch):
    real = recurrent_rows.accepted
    monkeypatch.setattr(recurrent_rows, "accepted", lambda *given: recurrent_rows.jnp.maximum(real(*given) - 1, 0))


def a_slot_begins_with_what_is_left_there(monkeypatch):
    real = recurrent_rows.read

    def read(cache, rows, *given, **how):
        return real(cache, rows._replace(position=recurrent_rows.jnp.maximum(rows.position, 1)), *given, **how)

    monkeypatch.setattr(recurrent_rows, "read", read)


def a_state_is_copied_from_the_slot_beside(monkeypatch):
    real = recurrent_rows.copy
    monkeypatch.setattr(recurrent_rows, "copy", lambda cache, source, target: real(cache, source ^ 1, target))


def a_prompt_that_others_wait_for_is_passed(monkeypatch):
    real = row_plan.counts
    monkeypatch.setattr(row_plan, "counts", lambda *given: real(*given[:-1], None))
    monkeypatch.setattr(SlotTable, "passed", lambda self, replica, slot: False)


@pytest.mark.shown("hybrid-equality")
@pytest.mark.parametrize(
    "fault",
    [
        one_more_row_is_committed,
        one_row_less_is_accepted,
        a_slot_begins_with_what_is_left_there,
        a_state_is_copied_from_the_slot_beside,
        a_prompt_that_others_wait_for_is_passed,
    ],
)
def test_a_planted_fault_is_found(monkeypatch, plain, fault):
    fault(monkeypatch)
    one = engine(drafting=drafts(plain, False))
    assert not lab.same_bits(plain, lab.run(one, ASKED))
