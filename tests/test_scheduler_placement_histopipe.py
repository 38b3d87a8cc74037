"""Placements: what each promises, alone under random completions, and under every round policy with frozen weights."""

from collections import Counter
from types import SimpleNamespace

import numpy as np
import plain_rollouts
import pytest
import racing_ring as ring
import sim_arms
from hypothesis import given, settings
from hypothesis import strategies as st
from toy_ring import SAMPLING, ToyPrompts

from jaxrl_post.ring.types import Capacity, Finish, Request, RolloutId
from jaxrl_post.scheduler.forecast import ReplicaCapacity
from jaxrl_post.scheduler.placement import seer
from jaxrl_post.scheduler.placement.histopipe import RankGroups, barrier, two_steps
from jaxrl_post.scheduler.placement.placement import LeastLoaded
from jaxrl_post.scheduler.placement.seer import Divided, LongestFirst

PROMPTS = ToyPrompts(400)
REPLICA = ReplicaCapacity(slots=8, kv_tokens=10_000, cost=sim_arms.FLAT)
NOTHING = lambda prompt_id: ()  # noqa: E731


def past(prompt_id):
    """Of three prompts in four: p0 is the shortest, p399 the longest."""
    number = int(prompt_id[1:])
    return () if number % 4 == 3 else (SimpleNamespace(lengths=np.array([number, number + 10, number + 5]) + 1),)


PLACEMENTS = {
    "least_loaded": lambda: LeastLoaded(3),
    "divided": Divided,
    "longest_first": lambda: LongestFirst(past=past),
    "probes": lambda: LongestFirst(past=NOTHING, probes=2),
    "ranks": lambda: RankGroups(REPLICA, past=past, ranks=3),
    "ranks, barrier, still": lambda: RankGroups(REPLICA, past=past, objective=barrier, migrate=False),
    "ranks, no past": lambda: RankGroups(REPLICA, past=NOTHING),
}


def group(number, size=3, epoch=0):
    prompt = PROMPTS.prompts[number]
    ids = [RolloutId(7, "train", epoch, prompt.id, sample) for sample in range(size)]
    return [Request(rollout_id=id, prompt=prompt, seed=id.seed(), max_tokens=900, sampling=SAMPLING) for id in ids]


def answer(request, length, finish=Finish.EOS):
    zeros = np.zeros(length)
    return plain_rollouts.rollout(request.rollout_id, request.prompt, zeros, finish=finish, clock=(0, length))


def drive(placement, waves, *, seed, slots, replicas=3, withdrawn=0.0):
    """Random completions of waves of groups; every release, in order. Checks what holds for all placements."""
    rng, running, released, withdraw = np.random.default_rng(seed), {}, [], set()
    for number, wave in enumerate(waves):
        placement.place(wave, number)
        expected = {request.rollout_id for mine in wave for request in mine}
        done = set()
        for _ in range(10_000):
            if done | withdraw >= expected:
                break
            free = [max(slots - sum(r.replica == at for r in running.values()), 0) for at in range(replicas)]
            new = placement.release(Capacity(slots=tuple(free), pages=tuple(free)))
            for request in new:
                assert 0 <= request.replica < replicas and request.rollout_id not in running
                assert request.rollout_id in expected - done - withdraw
                assert request.prefix is None or request.prefix.id == request.rollout_id
                running[request.rollout_id] = request
            released += new
            drop = [id for id in sorted(expected - done - withdraw) if rng.random() < withdrawn]
            placement.withdraw(drop)
            withdraw |= set(drop)
            running = {id: request for id, request in running.items() if id not in withdraw}
            for id in list(rng.permutation(len(running)))[: int(rng.integers(1, 4))]:
                if id >= len(running):
                    continue
                name = sorted(running)[id]
                stop = placement.learn(answer(running.pop(name), int(rng.integers(1, 900))))
                done.add(name)
                parked = [running.pop(other) for other in dict.fromkeys(stop) if other in running]
                placement.moved([answer(other, int(rng.integers(0, 5)), Finish.PARKED) for other in parked])
        assert done | withdraw >= expected, "somebody starves"
    return released, placement


@pytest.mark.parametrize("kind", PLACEMENTS)
@settings(max_examples=25)
@given(
    seed=st.integers(0, 99),
    slots=st.integers(1, 9),
    sizes=st.lists(st.integers(1, 12), min_size=1, max_size=3),
    withdrawn=st.sampled_from([0.0, 0.02]),
)
def test_everything_is_released_once_and_nothing_twice(kind, seed, slots, sizes, withdrawn):
    rng = np.random.default_rng(seed)
    order = iter(rng.permutation(400).tolist())
    waves = [[group(next(order)) for _ in range(size)] for size in sizes]
    released, placement = drive(PLACEMENTS[kind](), waves, seed=seed, slots=slots, withdrawn=withdrawn)
    again, _ = drive(PLACEMENTS[kind](), waves, seed=seed, slots=slots, withdrawn=withdrawn)
    assert [(r.rollout_id, r.replica) for r in released] == [(r.rollout_id, r.replica) for r in again]
    counts = Counter(r.rollout_id for r in released)
    assert max(counts.values()) <= 2  # once, and once more where it moved
    assert withdrawn or len(counts) == 3 * sum(sizes)
    other = PLACEMENTS[kind]()
    other.load_state_dict(placement.state_dict())
    assert other.state_dict() == placement.state_dict()
    assert placement.release(Capacity(slots=(9,) * 3, pages=(9,) * 3)) == []


@pytest.mark.parametrize("kind", ["divided", "longest_first", "probes"])
def test_no_more_than_there_are_slots_and_the_freest_replica_first(kind):
    placement = PLACEMENTS[kind]()
    placement.place([group(n) for n in range(0, 40, 4)], 0)
    new = placement.release(Capacity(slots=(2, 0, 4), pages=(9, 9, 1)))
    assert Counter(r.replica for r in new) == {0: 2, 2: 4}
    assert [r.replica for r in new] == [2, 2, 0, 2, 0, 2]  # of equals the one with more free pages
    assert placement.release(Capacity(slots=(0, 0, 0), pages=(9, 9, 9))) == []


def released(placement, count):
    """Prompts of the next `count` releases, one slot at a time."""
    return [placement.release(Capacity(slots=(1,), pages=(1,)))[0].rollout_id[3:5] for _ in range(count)]


def test_the_longest_past_goes_first():
    placement = LongestFirst(past=past)
    placement.place([group(4, 2), group(80, 2), group(40, 2)], 0)
    assert released(placement, 6) == [("p80", 0), ("p80", 1), ("p40", 0), ("p40", 1), ("p4", 0), ("p4", 1)]


def test_probes_go_ahead_and_tell_of_their_group():
    placement = LongestFirst(past=NOTHING)
    groups = {n: group(n, 4) for n in (0, 1, 2)}
    placement.place(list(groups.values()), 0)
    assert released(placement, 3) == [("p0", 0), ("p1", 0), ("p2", 0)]
    for number, length in ((0, 50), (1, 700)):
        assert placement.learn(answer(groups[number][0], length)) == ()
    assert released(placement, 2) == [("p2", 1), ("p2", 2)]  # nothing is known of it: it may be longest
    assert placement.learn(answer(groups[2][0], 60)) == ()
    assert released(placement, 2) == [("p1", 1), ("p1", 2)]
    assert placement.learn(answer(groups[2][1], 900)) == ()  # a sibling was longer than the probe
    assert released(placement, 2) == [("p2", 3), ("p1", 3)]
    assert released(placement, 3) == [("p0", 1), ("p0", 2), ("p0", 3)]


def test_the_oldest_is_not_forgotten(monkeypatch):
    monkeypatch.setattr(seer, "OLDEST_EVERY", 3)
    placement = LongestFirst(past=past)
    placement.place([group(4, 3), group(80, 4)], 0)
    assert released(placement, 4) == [("p80", 0), ("p80", 1), ("p4", 0), ("p80", 2)]


def test_an_idle_replica_takes_an_answer_over():
    placement = Divided()
    groups = group(0, 4) + group(1, 4)
    placement.place([groups[:4], groups[4:]], 0)
    new = placement.release(Capacity(slots=(4, 4), pages=(9, 9)))
    at = {r.rollout_id: r for r in new}
    second = [r for r in new if r.replica == 1]
    stops = [placement.learn(answer(request, 9)) for request in second]
    assert stops[:1] == [()]  # three to four is near enough
    (moving,) = stops[1]
    assert at[moving].replica == 0
    placement.moved([answer(at[moving], 7, Finish.PARKED)])
    (again,) = placement.release(Capacity(slots=(1, 2), pages=(9, 9)))
    assert (again.replica, again.prefix_mode, len(again.prefix)) == (1, "recompute", 7)


def test_odd_steps_ascend_and_even_ones_descend():
    placement = RankGroups(REPLICA, past=past, ranks=2, migrate=False)
    homes = []
    for step in range(2):
        wave = [group(n, 2, epoch=step) for n in (0, 1, 300, 301)]
        placement.place(wave, step)
        new = placement.release(Capacity(slots=(9,) * 4, pages=(9,) * 4))
        homes.append({number: {r.replica for r in new if r.prompt.id == f"p{number}"} for number in (0, 1, 300, 301)})
        assert [r.prompt.id for r in new[:4]] == ["p301", "p301", "p300", "p300"]  # the longest first
        placement.withdraw([r.rollout_id for r in new])
    ascending, descending = ({n: min(at) for n, at in home.items()} for home in homes)
    assert all(len(at) == 1 for home in homes for at in home.values())  # a group lies in one replica
    assert max(ascending[0], ascending[1]) < min(ascending[300], ascending[301])
    for block in ((0, 1), (300, 301)):
        assert {descending[n] for n in block} == {3 - ascending[n] for n in block}


def test_outliers_of_a_short_rank_go_to_the_longest():
    placement = RankGroups(REPLICA, past=past, ranks=2)
    short, long = [group(n, 10) for n in (0, 1)], [group(n, 10) for n in (300, 301)]
    placement.place([*short, *long], 0)
    new = {r.rollout_id: r for r in placement.release(Capacity(slots=(99,) * 4, pages=(9,) * 4))}
    order = [request for mine in short for request in mine]
    stops = [placement.learn(answer(request, 5)) for request in order[:18]]
    assert set(stops) == {()}  # as long as ever
    moving = placement.learn(answer(order[18], 200))  # one in twenty is left, and this one was far beyond the past
    assert moving == (order[19].rollout_id,)
    placement.moved([answer(order[19], 200, Finish.PARKED)])
    (again,) = placement.release(Capacity(slots=(99,) * 4, pages=(9,) * 4))
    assert again.replica in {new[r.rollout_id].replica for mine in long for r in mine}
    assert again.replica != new[again.rollout_id].replica and len(again.prefix) == 200
    last = [placement.learn(answer(request, 900)) for mine in long for request in mine]
    assert set(last) == {()}  # the longest have nowhere to go


def test_grown_answers_are_no_outliers():
    """Twice as long as the past in one round: in the next a rank group expects that."""
    placement = RankGroups(REPLICA, past=past, ranks=2)
    for step in range(2):
        short, long = group(100, 20, epoch=step), group(300, 4, epoch=step)
        placement.place([short, long], step)
        placement.release(Capacity(slots=(99,) * 4, pages=(9,) * 4))
        stops = [placement.learn(answer(request, 212)) for request in short]
        assert any(stops) == (step == 0)
        for request in long:
            placement.learn(answer(request, 612))
    assert placement.state_dict()["growth"] == pytest.approx((20 * 212 + 4 * 612) / (20 * 106 + 4 * 306))


def test_shrunk_answers_expect_no_less_than_the_past():
    """Half as long as the past in one round: in the next an answer as long as the past is still no outlier."""
    placement = RankGroups(REPLICA, past=past, ranks=2)
    for step, length in enumerate((53, 106)):
        short, long = group(100, 20, epoch=step), group(300, 4, epoch=step)
        placement.place([short, long], step)
        placement.release(Capacity(slots=(99,) * 4, pages=(9,) * 4))
        assert {placement.learn(answer(request, length)) for request in short} == {()}
        for request in long:
            placement.learn(answer(request, 3 * length))
    assert placement.state_dict()["growth"] == 1.0


def test_too_few_ranks_are_refused():
    with pytest.raises(ValueError, match="ranks=0 must be at least 1"):
        RankGroups(REPLICA, past=past, ranks=0)


def test_the_least_loaded_replica_after_a_relayout():
    placement = LeastLoaded(2)
    placement.place([group(n, 1) for n in range(4)], 0)
    assert [r.replica for r in placement.release(Capacity(slots=(9,) * 3, pages=(9,) * 3))] == [0, 1, 2, 0]


@pytest.mark.parametrize("policy", ["sync", "tail_batching"])
@pytest.mark.parametrize("kind", [kind for kind in PLACEMENTS if kind != "least_loaded"])
def test_any_placement_goes_with_any_round_policy(policy, kind):
    """At frozen weights what is trained is the same multiset of (id, tokens), however it was placed and moved."""
    outcomes = []
    for placement in (None, PLACEMENTS[kind]()):
        for slots in (1 << 30, 7):
            engine = ring.RacingEngine(slots=slots, order=3, replicas=3)
            learner = ring.turn(ring.policy(policy, replicas=3, placement=placement), engine, 6)
            outcomes.append(ring.trained(learner))
            placement = placement and PLACEMENTS[kind]()
    assert all(outcome == outcomes[0] for outcome in outcomes) and outcomes[0]


def test_who_was_asked_to_move_is_not_asked_again():
    """Two outliers end in one dispatch, before anybody has moved."""
    placement = RankGroups(REPLICA, past=past, ranks=2)
    short, long = [group(n, 10) for n in (0, 1)], [group(n, 10) for n in (300, 301)]
    placement.place([*short, *long], 0)
    placement.release(Capacity(slots=(99,) * 4, pages=(9,) * 4))
    order = [request for mine in short for request in mine]
    for request in order[:17]:
        placement.learn(answer(request, 5))
    assert placement.learn(answer(order[17], 200)) == (order[18].rollout_id, order[19].rollout_id)
    assert placement.learn(answer(order[18], 200)) == ()


def test_what_a_step_takes():
    """Of replicas of 1, 2 and 4 seconds: behind a barrier the longest; over both directions 1 + 4."""
    seconds = np.array([1.0, 2.0, 4.0])
    assert barrier(seconds) == 4 and two_steps(seconds) == 5
