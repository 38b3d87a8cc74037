"""The promise: speculation, batching, preemption, parking and restart change when a token is computed, never which
token.
"""

from __future__ import annotations

import dataclasses

import engine_lab as lab
import numpy as np
import pytest

from jaxrl_post.engine import bit_probe, row_numbers, row_program
from jaxrl_post.engine.host import packing
from jaxrl_post.engine.host.admission import Admission
from jaxrl_post.engine.host.sequence import SequenceState
from jaxrl_post.engine.host.wire import OUT_WINDOW, SEED0
from jaxrl_post.models import decoder
from jaxrl_post.models.model_config import Experts, FullAttention
from jaxrl_post.parallel import mesh as meshes
from jaxrl_post.ring.types import Prompt, Request, RolloutId, Sampling

ASKED = lab.requests(60)


@pytest.fixture(scope="module")
def shared():
    return lab.engine()


@pytest.fixture(scope="module")
def plain(shared):
    shared.reset()
    return lab.run(shared, ASKED)


def fresh(engine):
    engine.reset()
    return engine


def test_agrees_with_the_independent_sampler(plain):
    some = ASKED[::2]
    assert sum(len(plain[r.rollout_id]) for r in some) > 400
    assert {r.finish.value for r in plain.values()} == {"eos", "length"}
    assert lab.against_sampler(plain, some, lab.weights(0)) == []


def test_with_sinks_it_agrees_with_the_independent_sampler():
    """Two devices share the heads, and with them the sinks. Prompts are computed by rows and by tiles."""
    config = dataclasses.replace(lab.TINY, sinks=True, o_bias=True, windows=(None, 20))
    noise, params = np.random.default_rng(3), decoder.init(config, 0)
    params["embed"] = params["embed"] * 1.5
    for layer in params["layers"].values():
        layer |= {name: noise.normal(size=layer[name].shape).astype(np.float32) for name in ("sinks", "o_bias")}
    engine = lab.engine(params, config, mesh=meshes.make_mesh(tensor=2), prompt_rows=128)
    asked = lab.requests(16)
    out = lab.run(engine, asked)
    assert lab.against_sampler(out, asked, params, config) == []
    assert lab.against_sampler(out, asked, params, dataclasses.replace(config, sinks=False))


def test_with_heads_by_kind_of_layer_and_shared_pages_it_agrees_with_the_independent_sampler():
    """The last two layers read the pages of the first two. Two devices share the heads, and sequences are preempted."""
    config = dataclasses.replace(lab.TINY, layers=4, windows=(20, None) * 2, full=FullAttention(4, 12), shared_layers=2)
    engine = lab.engine(lab.weights(0, config), config, mesh=meshes.make_mesh(tensor=2), prompt_rows=128, pages=12)
    assert [one.pages.shape[-2:] for one in engine.device.state.cache] == [(4, 8), (8, 12)]
    asked = lab.requests(12)
    out = lab.run(engine, asked)
    assert engine.metrics()["sched/preemptions"] > 0
    assert lab.against_sampler(out, asked[::2], lab.weights(0, config), config) == []
    assert lab.against_sampler(
        out, asked[::2], lab.weights(0, config), dataclasses.replace(config, windows=(30, None) * 2)
    )


def test_with_embeddings_of_each_layer_and_experts_beside_it_agrees_with_the_independent_sampler():
    """Two devices share the vocabulary, and with it the rows of each layer."""
    config = dataclasses.replace(lab.TINY, layer_embeds=8, experts=Experts(4, 2, 16, beside=True))
    params, asked = lab.weights(0, config), lab.requests(12)
    out = lab.run(lab.engine(params, config, mesh=meshes.make_mesh(tensor=2), prompt_rows=128), asked)
    assert lab.against_sampler(out, asked[::2], params, config) == []
    other = params | {"layer_embed": np.roll(params["layer_embed"], 8, axis=1)}  # each layer has the rows of the next
    assert lab.against_sampler(out, asked[::2], other, config)
    layer = params["layers"]["1"] | {"moe_post_norm": params["layers"]["1"]["moe_post_norm"] / 2}
    other = params | {"layers": params["layers"] | {"1": layer}}
    assert lab.against_sampler(out, asked[::2], other, config)


def test_slot_order_and_submit_times_change_nothing(shared, plain):
    noise = np.random.default_rng(1)
    for _ in range(2):
        order = noise.permutation(len(ASKED))
        out = lab.run(fresh(shared), [ASKED[i] for i in order], submit_at=noise.integers(0, 12, len(ASKED)).tolist())
        assert lab.same_bits(plain, out)


def test_preemption_changes_nothing(plain):
    tight = lab.engine(pages=12)
    assert lab.same_bits(plain, lab.run(tight, ASKED))
    assert tight.metrics()["sched/preemptions"] >= 20


@pytest.mark.parametrize("mode", ["recompute", "verify", "restart"])
def test_parking_changes_nothing(shared, plain, mode):
    out, parks = lab.park_and_resume(fresh(shared), ASKED, mode=mode)
    assert parks >= 20
    assert lab.same_bits(plain, out)


def test_candidates_change_nothing(shared, plain):
    noise = np.random.default_rng(2)
    right = {r.rollout_id: plain[r.rollout_id].tokens for r in ASKED}
    junk = {name: noise.integers(0, 40, 48) for name in right}
    mixed = {name: np.where(noise.random(t.size) < 0.9, t, noise.integers(0, 40, t.size)) for name, t in right.items()}
    beyond = {name: np.concatenate([t, noise.integers(0, 40, 6)]) for name, t in right.items()}
    steps = {}
    for kind, guesses in (("right", right), ("junk", junk), ("mixed", mixed), ("beyond the end", beyond)):
        out = lab.run(fresh(shared), [lab.with_guesses(r, guesses[r.rollout_id]) for r in ASKED])
        assert lab.same_bits(plain, out), kind
        steps[kind] = shared.clock
    fresh(shared)
    lab.run(shared, ASKED)
    assert steps["right"] < 0.6 * shared.clock
    assert steps["junk"] <= 1.3 * shared.clock


@pytest.mark.extended
def test_cut_laws_agree_with_the_independent_sampler_and_change_under_nothing():
    """Runs top-k, top-p, both and neither side by side, on pages half as large.

    An engine without cuts and with other pages is another program with equal tokens. The records of kept ids are those of the
    sampler, and are as equal as the tokens.
    """
    cuts = ((0, 1.0), (5, 1.0), (0, 0.7), (8, 0.5))
    asked = lab.requests(40, cuts=cuts, samples=5)
    sizes = dict(restricted=True, kept_ids=lab.RECORDED)
    engine = lab.engine(**sizes, page_size=lab.BASE["page_size"] // 2, pages=2 * lab.BASE["pages"])
    out = lab.run(engine, asked)
    assert lab.against_sampler(out, asked[::2], lab.weights(0), kept=True) == []
    assert sum(int((rollout.records.counts > 0).sum()) for rollout in out.values()) > 300
    cutting = [r for r in asked if r.sampling.restricted]
    clones = lab.drafting("ours", lab.groups_of(cutting, out, vary=0.2), clones=True)
    drafted = lab.engine(**sizes, pages=48, drafting=clones)  # too few pages: some rollouts are preempted
    assert lab.same_bits({r.rollout_id: out[r.rollout_id] for r in cutting}, lab.run(drafted, cutting))
    plain = lab.run(lab.engine(), [r for r in asked if not r.sampling.restricted])
    for name, alone in plain.items():
        assert alone.tokens.tolist() == out[name].tokens.tolist()
        np.testing.assert_allclose(alone.logprobs, out[name].logprobs, atol=1e-5)
    noise = np.random.default_rng(4)
    right = [np.where(noise.random(len(out[r.rollout_id])) < 0.9, out[r.rollout_id].tokens, 7) for r in asked]
    assert lab.same_bits(out, lab.run(fresh(engine), [lab.with_guesses(r, g) for r, g in zip(asked, right)]))
    assert lab.same_bits(out, lab.park_and_resume(fresh(engine), asked, mode="verify")[0])


def test_a_cut_is_refused_by_an_engine_without(shared):
    asked = lab.requests(1, cuts=((5, 0.9),))
    with pytest.raises(ValueError, match="top_k=5 and top_p=0.9 need an engine with restricted=True"):
        fresh(shared).submit(asked)


def test_dispatch_length_changes_nothing(plain):
    for steps in (1, 3):
        assert lab.same_bits(plain, lab.run(lab.engine(steps_per_dispatch=steps), ASKED))


@pytest.mark.extended
def test_row_sizes_kept_by_the_probe_give_the_same_bits():
    several = lab.engine(row_sizes=(64, 96, 128))
    kept = bit_probe.keep_equal_sizes(several)
    assert kept[128] and set(several.row_sizes) == {size for size, equal in kept.items() if equal}
    outs = []
    for size in [s for s in kept if kept[s]]:
        several.row_sizes = (size,)
        outs.append(lab.run(fresh(several), ASKED))
    assert all(lab.same_bits(outs[0], out) for out in outs)


def test_probe_drops_a_size_that_differs(monkeypatch):
    several = lab.engine(row_sizes=(64, 96))
    real = several.device.programs.dispatch

    def off(order, *args):
        state, told = real(order, *args)
        if order.rows == 64:
            told = told._replace(out=np.array(told.out))
            told.out[..., OUT_WINDOW + several.sizes.emit] ^= 1
        return state, told

    monkeypatch.setattr(several.device.programs, "dispatch", off)
    assert bit_probe.keep_equal_sizes(several) == {64: False, 96: True}
    assert several.row_sizes == (96,) and several.clock == 0


def test_swap_gives_new_rollouts_the_new_weights_and_no_stale_prompt(shared):
    """The first rollouts of a group ran before the swap. The later ones must equal those of a fresh engine."""
    asked = lab.requests(24, samples=8, seed=5)
    new = lab.run(lab.engine(lab.weights(1)), asked)
    engine = lab.engine()
    before = lab.run(engine, asked[::2])
    held = [dataclasses.replace(r, rollout_id=r.rollout_id._replace(attempt=1)) for r in asked[:1]]
    engine.submit(held + asked[1::2])
    engine.step()
    engine.park([r.rollout_id for r in asked[1::2]])
    engine.swap(placed(lab.weights(1)), 1)
    out = lab.run(engine, asked[1::2])
    assert all((r.versions == 1).all() for name, r in out.items() if name.attempt == 0)
    assert lab.same_bits(
        {k: v for k, v in out.items() if k.attempt == 0}, {r.rollout_id: new[r.rollout_id] for r in asked[1::2]}
    )
    assert not lab.same_bits(before, {name: new[name] for name in before})


def test_verify_after_a_swap_gives_what_the_new_weights_would_have_given(shared):
    asked = lab.requests(20, samples=4, seed=6)
    near = {**lab.weights(0), "final_norm": lab.weights(0)["final_norm"] * 1.01}
    want = lab.run(lab.engine(near), asked)
    engine = lab.engine()
    engine.submit(asked)
    early = {r.id: r for _ in range(3) for r in engine.step()}
    parked = engine.park([r.rollout_id for r in asked])
    engine.swap(placed(near), 1)
    old = {**early, **{p.id: p for p in parked}}
    again = [dataclasses.replace(r, prefix=old[r.rollout_id], prefix_mode="verify") for r in asked]
    out = lab.run(engine, again)
    assert lab.same_bits(want, out)
    assert engine.metrics()["rows/draft_accepted"] > 20
    assert any(old[name].tokens.tolist() != out[name].tokens[: len(old[name])].tolist() for name in out)


def test_keep_equals_a_cached_reference_that_switches_weights(shared):
    asked = lab.requests(24, samples=4, seed=9, longest=40)
    weights = {0: lab.weights(0), 1: lab.weights(1)}
    out = lab.swap_in_mid_generation(lab.engine(), asked, placed(lab.weights(1)), steps=3, mode="keep")
    mixed = [r for r in asked if set(out[r.rollout_id].versions.tolist()) == {0, 1}]
    assert len(mixed) >= 4
    assert [o for o in (lab.kept_across_swaps(out[r.rollout_id], r, weights) for r in mixed) if o] == []
    swapped = {0: lab.weights(1), 1: lab.weights(0)}
    assert [o for o in (lab.kept_across_swaps(out[r.rollout_id], r, swapped) for r in mixed) if o]


def test_recompute_equals_a_full_forward_of_the_new_weights(shared):
    asked = lab.requests(24, samples=4, seed=10, longest=40)
    out = lab.swap_in_mid_generation(lab.engine(), asked, placed(lab.weights(1)), steps=3, mode="recompute")
    mixed = [r for r in asked if set(out[r.rollout_id].versions.tolist()) == {0, 1}]
    assert len(mixed) >= 4
    assert [o for o in (lab.recomputed_after_swap(out[r.rollout_id], r, lab.weights(1), 1) for r in mixed) if o] == []


def test_a_request_without_a_token_starts_again_at_a_swap():
    """A swap during prefill: all tokens are of the new version, so they must be those of the new weights, also after a
    preemption."""
    asked = lab.requests(12, samples=2, longest_prompt=80, longest=12, seed=12)
    want = lab.run(lab.engine(lab.weights(1)), asked)
    for pages, steps in ((96, 2), (12, 1)):
        engine = lab.engine(steps_per_dispatch=1, pages=pages)
        out = lab.swap_in_mid_generation(engine, asked, placed(lab.weights(1)), steps=steps, mode="keep")
        new = {name: r for name, r in out.items() if (r.versions == 1).all()}
        assert len(new) >= 4 and engine.metrics()["swap/num_started_again"] >= 1
        assert lab.same_bits(new, {name: want[name] for name in new})


def test_sizes_that_can_never_hold_a_rollout_are_refused():
    with pytest.raises(ValueError, match="engine.pages=5 of 16 cannot hold one rollout of engine.max_length=96"):
        lab.engine(pages=5)
    with pytest.raises(ValueError, match="must reach engine.slots=16"):
        lab.engine(row_sizes=(8,))


def test_keep_carries_versions_and_recompute_keeps_logprobs(shared):
    asked = lab.requests(12, samples=4, seed=7, temperatures=(1.0,))
    engine = lab.engine()
    engine.submit(asked)
    first = {r.id: r for r in engine.step()}
    parked = {p.id: p for p in engine.park([r.rollout_id for r in asked[:6]])}
    engine.swap(placed(lab.weights(1)), 4)
    back = [dataclasses.replace(r, prefix=parked[r.rollout_id]) for r in asked[:6] if r.rollout_id in parked]
    out = {**first, **lab.run(engine, back)}
    assert any(set(r.versions.tolist()) == {0, 4} for r in out.values())
    for name, prefix in parked.items():
        size = len(prefix)
        assert out[name].tokens[:size].tolist() == prefix.tokens.tolist()
        assert out[name].logprobs[:size].tobytes() == prefix.logprobs.tobytes()
        assert (out[name].versions[size:] == 4).all()


def test_evaluation_freezes_training_and_its_clock(shared, plain):
    engine = fresh(shared)
    engine.submit(ASKED)
    out = {r.id: r for r in engine.step()}
    clock = engine.clock
    asked = [dataclasses.replace(r, rollout_id=r.rollout_id._replace(purpose="eval")) for r in ASKED[:20]]
    engine.submit(asked)
    seen = {}
    while engine.pending and len(seen) < 20:
        seen.update((r.id, r) for r in engine.step())
    assert set(seen) == {r.rollout_id for r in asked} and engine.clock == clock
    while engine.pending:
        out.update((r.id, r) for r in engine.step())
    assert lab.same_bits(plain, out)
    for r in asked:
        assert seen[r.rollout_id].tokens.tolist() == plain[r.rollout_id._replace(purpose="train")].tokens.tolist()


def test_evaluation_gets_pages_when_training_holds_all(plain):
    engine = lab.engine(pages=12)
    engine.submit(ASKED)
    out = {r.id: r for r in engine.step()}
    asked = [dataclasses.replace(r, rollout_id=r.rollout_id._replace(purpose="eval")) for r in ASKED]
    out.update(lab.run(engine, asked))
    while engine.pending:
        out.update((r.id, r) for r in engine.step())
    assert lab.same_bits(plain, {k: v for k, v in out.items() if k.purpose == "train"})


def test_stop_strings_do_not_depend_on_the_dispatch_length():
    letters = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMN"
    decode = lambda tokens, before=(): "".join(letters[t] for t in tokens)  # noqa: E731
    asked = [
        dataclasses.replace(r, sampling=Sampling(stop_strings=("ab", "Q", "c")), max_tokens=40)
        for r in lab.requests(30, seed=8, temperatures=(1.0,))
    ]
    engines = [lab.engine(steps_per_dispatch=k, decode=decode) for k in (1, 8)]
    outs = [lab.run(engine, asked) for engine in engines]
    assert lab.same_bits(*outs)
    one_by_one, together = (engine.metrics() for engine in engines)
    assert one_by_one["rows/stop_string_overrun"] == 0
    # Without drafts each token comes of one decode row; what was settled beyond the string is dropped.
    kept = sum(len(r) for r in outs[1].values())
    assert together["rows/stop_string_overrun"] == together["rows/decode"] - kept > 50
    stopped = [r for r in outs[0].values() if r.finish.value == "stop"]
    assert len(stopped) > 10
    for r in stopped:
        text = decode(r.tokens)
        assert ("c" in text or "ab" in text) and not ("c" in text[:-1] or "ab" in text[:-1])


def test_pages_and_slots_come_back(shared):
    engine = fresh(shared)
    whole = engine.capacity
    lab.run(engine, ASKED[:30])
    engine.submit(ASKED[30:])
    engine.step()
    engine.park([r.rollout_id for r in ASKED])
    engine.reset()
    assert engine.capacity == whole and engine.pending == 0


def test_what_can_never_fit_is_refused_whole(shared):
    engine = fresh(shared)
    prompt = Prompt(id="long", tokens=np.zeros(90, np.int32))
    name = RolloutId(0, "train", 0, "long", 0)
    too_long = Request(rollout_id=name, prompt=prompt, seed=name.seed(), max_tokens=7, sampling=Sampling())
    with pytest.raises(ValueError, match="need 97 positions, engine.max_length=96; the largest valid max_tokens is 6"):
        engine.submit([ASKED[0], too_long])
    assert engine.pending == 0


def placed(params):
    from jaxrl_post.models import decoder
    from jaxrl_post.parallel import mesh as meshes

    return meshes.put(params, meshes.param_shardings(meshes.make_mesh(), decoder.axes(lab.TINY), "engine"))


# ---- planted faults (DESIGN 9.6): each must break one of the equalities above


def noise_keyed_by_slot(monkeypatch):
    real = packing.describe

    def describe(live, row, *rest):
        real(live, row, *rest)
        row[SEED0] ^= live.slot

    monkeypatch.setattr(packing, "describe", describe)


def position_off_by_one_after_a_park(monkeypatch):
    real = Admission.seat

    def seat(self, replica, one, entry):
        out = real(self, replica, one, entry)
        if out is not None and one.tokens:
            # the first position behind the shared pages is right in the leader's copy too: skip one more
            one.num_computed = min(one.num_computed + 1 + (one.num_computed > 0), one.num_tokens - 1)
        return out

    monkeypatch.setattr(Admission, "seat", seat)


def draft_not_compared_at_eos(monkeypatch):
    real = row_numbers.accept
    monkeypatch.setattr(
        row_numbers, "accept", lambda plan, guess, sampled, ended: real(plan, guess, sampled, ended & False)
    )


def verify_keeps_the_mismatched_token(monkeypatch):
    def accept(plan, guess, sampled, ended):
        _, counts, match = real(plan, guess, sampled, ended)
        return row_program.jnp.where(guess >= 0, guess, sampled), counts, match

    real = row_numbers.accept
    monkeypatch.setattr(row_numbers, "accept", accept)


def stale_prompt_page_after_a_swap(monkeypatch):
    monkeypatch.setattr(Admission, "prompt_key", lambda self, one: (one.request.prompt.id,))


def guesses_kept_after_a_miss(monkeypatch):
    real = SequenceState.extend

    def extend(self, more, version):
        left = self.candidates[len(more.tokens) :]
        real(self, more, version)
        self.candidates = left
        self._replace(self._settled)  # says how many there are

    monkeypatch.setattr(SequenceState, "extend", extend)


@pytest.mark.shown("equality")
def test_planted_noise_keyed_by_slot(monkeypatch, plain):
    noise_keyed_by_slot(monkeypatch)
    assert not lab.same_bits(plain, lab.run(lab.engine(), ASKED[::-1]))


@pytest.mark.shown("equality")
def test_planted_position_off_by_one_after_a_park(monkeypatch, plain):
    position_off_by_one_after_a_park(monkeypatch)
    out, _ = lab.park_and_resume(lab.engine(), ASKED, mode="recompute")
    assert not lab.same_bits(plain, out)


@pytest.mark.shown("equality")
@pytest.mark.parametrize("fault", [draft_not_compared_at_eos, verify_keeps_the_mismatched_token])
def test_planted_faults_of_acceptance(monkeypatch, plain, fault):
    fault(monkeypatch)
    noise = np.random.default_rng(2)
    guesses = [
        np.concatenate(
            [
                np.where(noise.random(len(plain[r.rollout_id])) < 0.95, plain[r.rollout_id].tokens, 7),
                noise.integers(0, 40, 6),
            ]
        )
        for r in ASKED
    ]
    out = lab.run(lab.engine(), [lab.with_guesses(r, g) for r, g in zip(ASKED, guesses)])
    assert not lab.same_bits(plain, out)


def test_planted_stale_prompt_page_after_a_swap(monkeypatch):
    stale_prompt_page_after_a_swap(monkeypatch)
    with pytest.raises(AssertionError):
        test_swap_gives_new_rollouts_the_new_weights_and_no_stale_prompt(None)


def test_guesses_left_after_a_miss_cost_rows_but_no_token(monkeypatch, plain):
    """Not a fault: candidates at the wrong place are only wrong candidates."""
    guesses_kept_after_a_miss(monkeypatch)
    out = lab.run(lab.engine(), [lab.with_guesses(r, np.full(40, 5)) for r in ASKED])
    assert lab.same_bits(plain, out)
