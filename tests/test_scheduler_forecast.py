"""Forecasts against one step at a time, allocations against trying all of them."""

import itertools

import numpy as np
import pytest
import sim_arms
from hypothesis import given, settings
from hypothesis import strategies as st
from models.throughput import step_ends

from jaxrl_post.engine.step_cost import DecodeCost
from jaxrl_post.scheduler.forecast import ReplicaCapacity, replay, share
from jaxrl_post.scheduler.placement.histopipe import allocate, barrier, curve, spread, two_steps
from jaxrl_post.simulate.pace import Independent

COST = DecodeCost(weights_s=1.0, token_s=0.01, row_s=0.3, request_s=0.02, prefill_s=0.001)
WORK = st.lists(st.tuples(st.integers(0, 5), st.integers(1, 30)), max_size=12)


def step_by_step(replica, work):
    """One token of every running answer a step; what does not fit is the youngest, with its tokens kept."""
    waiting, running, seconds, parked, most = [[p, n, 0] for p, n in work], [], 0.0, 0, 0
    while waiting or running:
        while waiting and len(running) < replica.slots:
            prompt, _, done = waiting[0]
            held = sum(p + d for p, _, d in running)
            if running and held + prompt + done + len(running) >= replica.kv_tokens:
                break
            running.append(waiting.pop(0))
            seconds += replica.cost.prefill_s * (prompt + done)
        while len(running) > 1 and sum(p + d for p, _, d in running) + len(running) > replica.kv_tokens:
            waiting.insert(0, running.pop())
            parked += 1
        held = sum(p + d for p, _, d in running)
        seconds += float(replica.cost(np.array([len(running)]), np.array([held + len(running) / 2]))[0])
        for live in running:
            live[2] += 1
        most = max(most, held + len(running))
        running = [live for live in running if live[2] < live[1]]
    return seconds, parked, most / replica.kv_tokens


@given(work=WORK, slots=st.integers(1, 6), kv_tokens=st.sampled_from([40, 70, 10_000]))
def test_a_replay_is_what_single_steps_give(work, slots, kv_tokens):
    replica = ReplicaCapacity(slots=slots, kv_tokens=kv_tokens, cost=COST)
    found, want = replay(replica, work), step_by_step(replica, work)
    assert found.preemptions == want[1] and found.pressure == pytest.approx(want[2])
    # Within a stretch the context grows evenly, so its mean is that of its middle; the larger of two lines is not even.
    linear = ReplicaCapacity(
        slots=slots, kv_tokens=kv_tokens, cost=DecodeCost(weights_s=1.0, token_s=0.01, row_s=0.0, prefill_s=0.001)
    )
    assert replay(linear, work).seconds == pytest.approx(step_by_step(linear, work)[0])
    assert found.seconds == pytest.approx(want[0], rel=0.05)


@pytest.mark.parametrize("kv_tokens", [90, None])
def test_a_replay_agrees_with_the_simulated_engine(kv_tokens):
    engine = sim_arms.engine(slots=4, pace=Independent(COST, 1e-3), kv_tokens=kv_tokens)
    asked = [sim_arms.request(number) for number in range(30)]
    lengths = [sim_arms.texts().length(r.rollout_id, r.prompt, 0) for r in asked]
    engine.submit(asked)
    while engine.pending:
        engine.step()
    replica = ReplicaCapacity(slots=4, kv_tokens=kv_tokens or 1 << 40, cost=COST)
    found = replay(replica, [(2, length) for length in lengths])
    # The simulated engine counts parts of tokens and parks when the KV is full, a replay when one more of each would not fit.
    assert found.seconds == pytest.approx(engine.seconds, rel=0.05 if kv_tokens else 1e-3)
    assert (found.preemptions > 0) == (kv_tokens is not None)


@given(work=WORK.filter(len), replicas=st.integers(1, 5))
def test_a_share_holds_the_longest_and_every_nth(work, replicas):
    mine = share(work, replicas)
    assert len(mine) == -(-len(work) // replicas) and max(n for _, n in work) == max(n for _, n in mine)
    places = iter(work)
    assert all(any(found == pair for found in places) for pair in mine)  # in their own order
    assert sum(n for _, n in mine) * replicas >= sum(n for _, n in work)


def curves_of(rng, ranks, replicas):
    work = np.sort(rng.lognormal(0, 1, ranks))
    counts = np.arange(1, replicas + 1)
    return np.array([np.maximum(w / counts, w * rng.uniform(0.1, 0.6)) + 0.1 * w / counts for w in work])


@pytest.mark.parametrize("objective, worst, mean", [(barrier, 1.0, 1.0), (two_steps, 1.6, 1.01)])
def test_an_allocation_is_near_the_best_of_all(objective, worst, mean):
    rng, ratios = np.random.default_rng(0), []
    for _ in range(150):
        ranks = int(rng.integers(2, 5))
        replicas = int(rng.integers(ranks + 1, 12))
        curves = curves_of(rng, ranks, replicas)
        sizes = allocate(curves, replicas, objective)
        assert len(sizes) == ranks and min(sizes) >= 1 and sum(sizes) == replicas
        best = min(
            objective(spread(curves, np.diff([0, *cut, replicas])))
            for cut in itertools.combinations(range(1, replicas), ranks - 1)
        )
        ratios.append(objective(spread(curves, sizes)) / best)
    assert max(ratios) <= worst + 1e-9 and np.mean(ratios) <= mean + 1e-9


def test_long_ranks_get_more_replicas():
    """Ten times the work each: with a barrier both rank groups end together, by hand."""
    curves = np.array([[10.0 / n for n in range(1, 12)], [100.0 / n for n in range(1, 12)]])
    assert allocate(curves, 11, barrier) == [1, 10]
    with pytest.raises(ValueError, match="2 rank groups for 1 replicas; the nearest valid number of rank groups is 1"):
        allocate(curves, 1, barrier)


@settings(max_examples=30)
@given(work=WORK.filter(len), most=st.integers(1, 6))
def test_a_curve_never_rises(work, most):
    seconds = curve(ReplicaCapacity(slots=2, kv_tokens=10_000, cost=COST), work, most)
    assert seconds.shape == (most,) and np.all(np.diff(seconds) <= 0)
    assert seconds[0] == replay(ReplicaCapacity(slots=2, kv_tokens=10_000, cost=COST), work).seconds


def test_pipelined_steps_by_hand():
    """Two replicas that take turns being slow: each step 4 with a barrier, 5 for two of them without one."""
    times = np.array([[1.0, 4.0], [4.0, 1.0]] * 3)
    assert step_ends(times, 2.0, lag=0).tolist() == [6, 12, 18, 24, 30, 36]
    # Step 2 waits for the weights of step 0, at 6; replica 0: 1, 5, then 6 + 1, 7 + 4, ..
    assert step_ends(times, 2.0, lag=1)[:4].tolist() == [6.0, 8.0, 12.0, 14.0]
    assert step_ends(times, 0.0, lag=9).tolist() == [4, 5, 9, 10, 14, 15]


def test_a_step_of_one_replica_is_independent_of_the_lag():
    times = np.full((5, 1), 3.0)
    assert np.array_equal(step_ends(times, 0.0, 0), step_ends(times, 0.0, 1))
