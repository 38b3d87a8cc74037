"""Conversations: turns, parking, preemption, drafts, swaps and restarts change when a token is computed, never which.

Every arm is compared bit for bit, and one with the independent sampler, which samples each turn from the text so far.
"""

from __future__ import annotations

import dataclasses

import engine_lab as lab
import fake_environments as fake
import numpy as np
import pytest
import sampler

from jaxrl_post.engine.host import sequence
from jaxrl_post.engine.host.turns import Turns
from jaxrl_post.ring.types import Finish, Rollout
from jaxrl_post.runs.checkpoint import host_state

ENDS = (3, 9, 17, 25)
ASKED = [
    dataclasses.replace(r, max_tokens=48, sampling=dataclasses.replace(r.sampling, eos_ids=ENDS))
    for r in lab.requests(40, longest_prompt=24, temperatures=(1.0, 0.7))
]


def conversing(engine, delay: int = 10) -> Turns:
    engine.reset()
    return Turns(engine, fake.Scripted(), delay=delay)


@pytest.fixture(scope="module")
def shared():
    return lab.engine()


@pytest.fixture(scope="module")
def plain(shared):
    return lab.run(conversing(shared), ASKED)


def same(a: dict, b: dict) -> bool:
    return lab.same_bits(a, b) and all(np.array_equal(a[k].sampled, b[k].sampled) for k in a)


def turns_of(rollout: Rollout) -> int:
    return 1 + int(np.sum(np.diff(rollout.sampled.astype(int)) == -1))


def test_agrees_with_the_independent_sampler(plain):
    assert sorted(map(turns_of, plain.values()))[-5] >= 3, "few conversations have several turns"
    for request in ASKED[::2]:
        got = plain[request.rollout_id]
        draws, sampled = fake.reference(request, lab.weights(0))
        assert sampler.disagreement(draws, got.tokens, got.logprobs, got.entropies) == ""
        if [d.token for d in draws] == got.tokens.tolist():
            assert got.sampled.tolist() == sampled


def test_endings(plain):
    for rollout in plain.values():
        assert rollout.sampled[-1], "a conversation ends with a sampled token"
        over = rollout.tokens[-1] in ENDS and fake.words(rollout.tokens) is None
        assert rollout.finish is (Finish.EOS if over else Finish.LENGTH)
        assert not rollout.logprobs[~rollout.sampled].any()
    assert {r.finish for r in plain.values()} == {Finish.EOS, Finish.LENGTH}


def test_turns_that_are_cut_are_handed_over_by_option_and_no_token_depends_on_it(shared, plain):
    shared.reset()
    silent = Turns(shared, fake.Scripted(), delay=10, steps_cut=False)
    assert same(plain, lab.run(silent, ASKED))
    heard = conversing(shared)
    assert same(plain, lab.run(heard, ASKED))
    turns = sum(map(turns_of, plain.values()))
    cut = sum(rollout.tokens[-1] not in ENDS for rollout in plain.values())
    assert cut > 3 and heard._environments.started == turns == silent._environments.started + cut


@pytest.mark.parametrize("delay", [0, 3, 200])
def test_delay_slot_order_and_submit_times_change_nothing(shared, plain, delay):
    noise = np.random.default_rng(delay)
    asked = [ASKED[i] for i in noise.permutation(len(ASKED))]
    out = lab.run(conversing(shared, delay), asked, submit_at=noise.integers(0, 12, len(ASKED)).tolist())
    assert same(plain, out)


def test_a_turn_frees_its_slot_and_enters_again_at_its_clock(shared):
    engine = conversing(shared, 10)
    engine.submit(ASKED[:20])
    before = {}
    while engine.pending:
        waiting = {id: due for id, (due, _) in engine._waiting.items()}
        running = len(engine._requests) - len(waiting)
        slots = engine.capacity.slots[0]
        assert slots == max(16 - running, 0), "a conversation between two turns holds no slot"
        clock = engine.clock
        engine.step()
        for id, due in waiting.items():
            if id not in engine._waiting or engine._waiting[id][0] != due:
                assert due <= clock or not running, f"{id} was joined at {clock}, before {due}"
        before = waiting or before
    assert before, "no conversation ever waited"


def test_preemption_changes_nothing(plain):
    tight = lab.engine(pages=12)
    assert same(plain, lab.run(conversing(tight), ASKED))
    assert tight.metrics()["sched/preemptions"] >= 10


def test_drafts_change_nothing(shared, plain):
    groups = lab.groups_of(ASKED, plain, vary=0.1)
    drafted = lab.engine(drafting=lab.drafting("ours", groups), cost=lab.FREE_ROWS)
    engine = Turns(drafted, fake.Scripted(), delay=10)
    assert same(plain, lab.run(engine, ASKED))
    assert sum(int(r.drafted.sum()) for r in lab.run(engine, ASKED).values()) > 50


@pytest.mark.parametrize("mode", ["recompute", "verify", "restart"])
def test_parking_changes_nothing(shared, plain, mode):
    out, parks = lab.park_and_resume(conversing(shared), ASKED, mode=mode)
    assert same(plain, out)
    assert parks >= 20


@pytest.mark.parametrize("rule", ["keep", "recompute", "verify"])
def test_a_swap_to_equal_weights_changes_nothing(plain, rule):
    from jaxrl_post.engine.host.swap_policy import SwapPolicy

    below = lab.engine(swap_policy=SwapPolicy(rule))
    engine, out, dispatches = conversing(below), {}, 0
    engine.submit(ASKED)
    while engine.pending:
        out.update((r.id, r) for r in engine.step())
        dispatches += 1
        if dispatches % 10 == 0:
            engine.swap(below.device.params, engine.version + 1)
    assert same(plain, out)
    assert max(r.versions.max() for r in out.values()) > 1


def test_verified_conversations_are_those_of_the_new_weights(shared, plain):
    """A conversation of older weights is verified turn by turn: what comes out is what the new weights give alone."""
    other = lab.engine(lab.weights(1))
    alone = lab.run(conversing(other), ASKED)
    assert sum(alone[r.rollout_id].tokens.tobytes() != plain[r.rollout_id].tokens.tobytes() for r in ASKED) > 10
    again = [dataclasses.replace(r, prefix=plain[r.rollout_id], prefix_mode="verify") for r in ASKED]
    assert same(alone, lab.run(conversing(other), again))
    mine = [dataclasses.replace(r, prefix=plain[r.rollout_id], prefix_mode="verify") for r in ASKED]
    assert same(plain, lab.run(conversing(shared), mine))


def test_evaluation_between_training_changes_nothing(shared, plain):
    asked = [dataclasses.replace(r, rollout_id=r.rollout_id._replace(purpose="eval")) for r in ASKED[:12]]
    engine, out, seen = conversing(shared), {}, {}
    engine.submit(ASKED)
    for _ in range(3):
        out.update((r.id, r) for r in engine.step())
    clock = engine.clock
    engine.submit(asked)
    while len(seen) < len(asked):
        assert engine.pending == len(asked) - len(seen)
        seen.update((r.id._replace(purpose="train"), r) for r in engine.step())
    assert engine.clock == clock, "evaluation does not advance the clock"
    while engine.pending:
        out.update((r.id, r) for r in engine.step())
    assert same(plain, out)
    assert same({r.rollout_id: plain[r.rollout_id] for r in ASKED[:12]}, seen)


@pytest.mark.parametrize("stop", [2, 5])
def test_restart_from_a_saved_state_changes_nothing(shared, plain, stop, tmp_path):
    """Both go on: the run that saved, and one that begins from the files."""
    prompts = {r.prompt.id: r.prompt for r in ASKED}
    engine, first = conversing(shared), {}
    engine.submit(ASKED)
    for _ in range(stop):
        first.update((r.id, r) for r in engine.step())
    host_state.write_state(tmp_path / "state", {"engine": shared.state_dict(), "turns": engine.state_dict()})
    assert engine._waiting, "no conversation waits where it is saved"
    on, clocks = dict(first), []
    while engine.pending:
        on.update((r.id, r) for r in engine.step())
        clocks.append(engine.clock)
    state = host_state.read_state(tmp_path / "state")
    shared.load_state_dict(state["engine"], prompts)
    revived, resumed = Turns(shared, fake.Scripted(), delay=10), dict(first)
    revived.load_state_dict(state["turns"], prompts)
    again = []
    while revived.pending:
        resumed.update((r.id, r) for r in revived.step())
        again.append(revived.clock)
    assert same(plain, on) and same(plain, resumed) and clocks == again


def _observed_token_ends_a_rollout(monkeypatch):
    monkeypatch.setattr(sequence, "last_turn", lambda sampled: 0)


def _another_token_observed(monkeypatch):
    whole = Rollout.extended
    monkeypatch.setattr(
        Rollout,
        "extended",
        lambda self, tokens, clock, **how: whole(self, [(token + 1) % 40 for token in tokens], clock, **how),
    )


def _noise_begins_again(monkeypatch):
    whole = Turns._continued

    def continued(self, rollout):
        request = whole(self, rollout)
        return dataclasses.replace(request, seed=request.seed[::-1])

    monkeypatch.setattr(Turns, "_continued", continued)


@pytest.mark.parametrize("fault", [_observed_token_ends_a_rollout, _another_token_observed, _noise_begins_again])
def test_planted_faults_are_found(shared, plain, fault, monkeypatch):
    fault(monkeypatch)
    assert not same(plain, lab.run(conversing(shared), ASKED))
