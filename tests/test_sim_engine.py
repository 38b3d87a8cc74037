"""The event-driven engine against one that goes token by token, and its own contracts."""

from __future__ import annotations

import numpy as np
import pytest
import sim_arms as arms
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxrl_post.engine.step_cost import DecodeCost
from jaxrl_post.ring.types import Finish
from jaxrl_post.simulate.engine import SimEngine
from jaxrl_post.simulate.pace import DraftSpeed, Independent, LockStep
from jaxrl_post.simulate.texts import SimText


def drain(engine):
    out = []
    while engine.pending:
        out += engine.step()
    return out


def told(rollout):
    return rollout.id, rollout.finish_clock, rollout.tokens.tolist(), rollout.versions.tolist()


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_events_are_those_of_an_engine_that_goes_token_by_token(data):
    """Under swaps, parks and re-entries in every mode, at the same clocks."""
    tv = data.draw(st.sampled_from([0.0, 0.02, 0.2]))
    replicas, slots = data.draw(st.integers(1, 2)), data.draw(st.integers(1, 3))
    fast = arms.engine(tv=tv, replicas=replicas, slots=slots)
    slow = arms.TokenByToken(arms.texts(tv), replicas, slots)
    number, known = 0, set()
    for _ in range(data.draw(st.integers(1, 12))):
        what = data.draw(st.sampled_from(["submit", "step", "swap", "remove", "park"]))
        some = [name for name in sorted(known) if data.draw(st.booleans())] if what in ("remove", "park") else []
        if what == "submit":
            asked = [
                arms.request(number + n, replica=data.draw(st.integers(0, replicas - 1)))
                for n in range(data.draw(st.integers(1, 5)))
            ]
            number += len(asked)
            known |= {one.rollout_id for one in asked}
            fast.submit(asked), slow.submit(asked)
        elif what == "swap":
            fast.swap(None, fast.version + 1)
            slow.version += 1
        elif what == "remove":
            fast.park(some), slow.drop(some)
            known -= set(some)
        elif what == "park":
            mode = data.draw(st.sampled_from(["recompute", "verify", "restart"]))
            back = [arms.request(one.id.prompt_id, prefix=one, mode=mode) for one in fast.park(some)]
            slow.drop(some)
            fast.submit(back), slow.submit(back)
        else:
            known -= both_go_on(fast, slow)
    while fast.pending:
        known -= both_go_on(fast, slow)
    assert not known and not any(slow.running) and not any(slow.waiting)


def both_go_on(fast, slow):
    done = fast.step()
    expected = []
    while slow.clock < fast.clock:
        assert not expected, "an event was passed over"
        expected = slow.step()
    assert sorted(map(told, done)) == sorted(
        (name, clock, tokens, versions) for name, clock, tokens, versions in expected
    )
    return {rollout.id for rollout in done}


def test_the_clock_jumps_to_the_next_finish_and_seconds_add_up():
    engine = arms.engine(slots=10, pace=LockStep(arms.FLAT))
    engine.submit([arms.request(n) for n in range(10)])
    lengths = sorted(arms.texts().length(arms.request(n).rollout_id, None, 0) for n in range(10))
    done = drain(engine)
    assert [rollout.finish_clock for rollout in done] == lengths == [len(rollout) for rollout in done]
    assert engine.clock == engine.seconds == lengths[-1]
    assert all((rollout.finish is Finish.LENGTH) == (len(rollout) == arms.CAP) for rollout in done)
    assert engine.metrics()["sim/num_tokens_generated"] == sum(lengths)


def test_seconds_follow_the_cost_of_the_slowest_replica():
    """Two answers of 5 and 9 tokens in one replica, one of 3 in the other; a step costs 1 + 0.1 a row, by hand."""
    from jaxrl_post.engine.step_cost import DecodeCost

    class Given:
        cap, frozen = 9, True

        def path(self, rollout_id, prompt, spans):
            from jaxrl_post.simulate.texts import SimText

            return SimText({"0": 5, "1": 9, "2": 3}[prompt.id], (0,), (0,))

    from jaxrl_post.simulate.engine import SimEngine

    cost = DecodeCost(weights_s=1.0, token_s=0.0, row_s=0.0, request_s=0.1)
    engine = SimEngine(Given(), replicas=2, slots=4, pace=LockStep(cost))
    engine.submit([arms.request(0, cap=9), arms.request(1, cap=9), arms.request(2, replica=1, cap=9)])
    drain(engine)
    assert engine.seconds == pytest.approx(5 * 1.2 + 4 * 1.1)
    alone = SimEngine(Given(), replicas=2, slots=4, pace=Independent(cost, 0.1))
    alone.submit([arms.request(0, cap=9), arms.request(1, cap=9), arms.request(2, replica=1, cap=9)])
    done = drain(alone)
    assert [rollout.finish_clock for rollout in done] == [33, 60, 104]  # 3 x 1.1, 5 x 1.2, and 4 x 1.1 more, in tenths
    assert alone.seconds == pytest.approx(10.4)


def test_drafts_speed_the_tail_up_and_change_no_token():
    plain, drafting = (
        arms.engine(slots=8, cap=400, pace=LockStep(arms.FLAT, drafts))
        for drafts in (DraftSpeed(), DraftSpeed(tokens=2.0, width=3, most_running=3))
    )
    for engine in (plain, drafting):
        engine.submit([arms.request(n, cap=400) for n in range(8)])
    a, b = drain(plain), drain(drafting)
    assert {rollout.id: rollout.tokens.tolist() for rollout in a} == {
        rollout.id: rollout.tokens.tolist() for rollout in b
    }
    third = sorted(len(rollout) for rollout in a)[-4]
    longest = max(len(rollout) for rollout in a)
    assert drafting.clock == third + -(-(longest - third) // 2) < plain.clock


@settings(max_examples=30, deadline=None)
@given(st.integers(45, 120), st.integers(2, 8), st.integers(0, 99))
def test_a_full_memory_costs_time_and_never_a_token(kv_tokens, slots, first):
    roomy, tight = arms.engine(slots=slots, tv=0.05), arms.engine(slots=slots, tv=0.05, kv_tokens=kv_tokens)
    for engine in (roomy, tight):
        engine.submit([arms.request(first + n) for n in range(12)])
    a, b = drain(roomy), drain(tight)
    assert {rollout.id: rollout.tokens.tolist() for rollout in a} == {
        rollout.id: rollout.tokens.tolist() for rollout in b
    }
    assert tight.clock >= roomy.clock
    assert max(tight.capacity.pages) == kv_tokens  # all of it came back


def test_what_waits_takes_a_slot_at_the_clock_at_which_one_is_free():
    engine = arms.engine(slots=1)
    engine.submit([arms.request(n) for n in range(3)])
    assert engine.capacity.slots == (0,)
    done = drain(engine)
    assert [rollout.start_clock for rollout in done] == [0, *(rollout.finish_clock for rollout in done[:-1])]
    assert engine.capacity.slots == (1,)


@pytest.mark.parametrize(
    "wrong, sentence",
    [
        (dict(replica=3), "wants replica 3 of 1"),
        (dict(cap=20), "may have 20 tokens, but rollouts of this workload have up to 40"),
    ],
)
def test_bad_requests_are_refused_whole(wrong, sentence):
    engine = arms.engine()
    with pytest.raises(ValueError, match=sentence):
        engine.submit([arms.request(0), arms.request(1, **wrong)])
    assert engine.pending == 0


def test_a_version_must_rise():
    engine = arms.engine()
    with pytest.raises(ValueError, match="version 0 must be greater than the current 0"):
        engine.swap(None, 0)


def test_parked_ones_come_back_as_they_were():
    engine = arms.engine(slots=2)
    asked = [arms.request(n) for n in range(4)]
    engine.submit(asked)
    first = engine.step()
    parked = engine.park([one.rollout_id for one in asked])
    assert engine.pending == 0 and engine.capacity.slots == (2,)
    assert [len(rollout) for rollout in parked if rollout.finish is Finish.PARKED and len(rollout)] == [
        first[0].finish_clock
    ]
    assert np.all(parked[0].tokens == 0)


def timed(*lengths, pace, **more):
    """An engine of one replica, with requests 0, 1, .. whose answers have these lengths; prompts have 2 tokens."""

    class Known:
        cap, frozen = max(lengths), True

        def path(self, rollout_id, prompt, spans):
            return SimText(lengths[int(prompt.id)], (0,), (0,))

    engine = SimEngine(Known(), replicas=1, slots=4, pace=pace, **more)
    engine.submit([arms.request(number, cap=max(lengths)) for number in range(len(lengths))])
    return engine


def test_a_prefill_holds_its_replica_up():
    """2 prompt tokens of 0.5 s before 5 tokens of 1 s, in tenths."""
    cost = DecodeCost(weights_s=1.0, token_s=0.0, row_s=0.0, prefill_s=0.5)
    assert [rollout.finish_clock for rollout in drain(timed(5, pace=Independent(cost, 0.1)))] == [10 + 50]


def test_where_the_memory_is_full_the_youngest_waits():
    """Room for 12 tokens: with 2 + 4 of each it is full. The first goes on to its end at 9, then the other has 5 to go."""
    engine = timed(9, 9, pace=LockStep(arms.FLAT), kv_tokens=12)
    assert [(rollout.id.prompt_id, rollout.finish_clock) for rollout in drain(engine)] == [("0", 9), ("1", 14)]
    assert engine.metrics()["sim/num_preempted"] == 1


def test_what_is_verified_costs_what_the_new_weights_refuse():
    refused = 0
    for number in range(12):
        engine = arms.engine(tv=0.2)
        engine.submit([arms.request(number), arms.request(100)])
        engine.step()
        parked = {rollout.id.prompt_id: rollout for rollout in engine.park([arms.request(number).rollout_id])}
        if str(number) not in parked:
            continue
        before, clock = parked[str(number)], engine.clock
        engine.swap(None, 1)
        engine.submit([arms.request(number, prefix=before, mode="verify")])
        now = next(rollout for rollout in drain(engine) if rollout.id == before.id)
        shorter = min(len(before), len(now))
        same = int(np.argmin(np.append(before.tokens[:shorter] == now.tokens[:shorter], False)))
        assert now.finish_clock == clock + max(len(now) - same, 1)
        refused += same < len(before)
    assert refused >= 3


def test_drafts_take_rows():
    """One answer of 5 tokens at two a step is 3 steps, each of 1 + 3 rows: 1 + 0.1 a row, by hand."""
    cost = DecodeCost(weights_s=1.0, token_s=0.0, row_s=0.0, request_s=0.1)
    engine = timed(5, pace=LockStep(cost, DraftSpeed(tokens=2.0, width=3, most_running=1)))
    assert [rollout.finish_clock for rollout in drain(engine)] == [3]
    assert engine.seconds == pytest.approx(3 * 1.4)
