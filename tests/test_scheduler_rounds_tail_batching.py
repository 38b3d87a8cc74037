"""Tail batching of both kinds against twins written from their definitions."""

import math
from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from racing_ring import RacingEngine, names, policy, text, trained, turn, whole
from toy_ring import ToyPrompts

from jaxrl_post.ring.history import Past
from jaxrl_post.ring.types import RolloutId
from jaxrl_post.scheduler.decision_log import Recorder


def twin(prompts, *, steps, size, samples, kept, over, redraws, together=1):
    """Short and long rounds from their definition, with a slot for everybody and weights that stand still: a rollout ends
    at its length, a group with its `kept`-th rollout, a race with its `size`-th group; a long round makes `together` batches.
    The batches, as names."""
    position, queue, batches = 0, [], []

    def end(entry, count):
        epoch, prompt, attempt = entry
        ids = [RolloutId(7, "train", epoch, prompt.id, s, attempt) for s in range(count)]
        return sorted((text(id.seed(), 0, 0.0, 24).size, id) for id in ids)[kept - 1]

    while len(batches) < steps:
        left, batch = steps * size - position, []
        if len(queue) >= together * size or left < size:
            many = size * min(together, (len(queue) + left) // size if left < size else together)
            batch, queue = queue[:many], queue[many:]
            fresh = many - len(batch)
            batch += [(*prompts.at(p), 0) for p in range(position, position + fresh)]
            position += fresh
        else:
            count = min(math.ceil(over * size - 1e-9), left)
            drawn = [(*prompts.at(p), 0) for p in range(position, position + count)]
            position += count
            winners = sorted(drawn, key=lambda entry: end(entry, samples))[:size]
            batch = [entry for entry in drawn if entry in winners]
            queue += [(epoch, prompt, int(redraws)) for epoch, prompt, _ in drawn if (epoch, prompt, 0) not in winners]
        found = [(epoch, prompt.id) for epoch, prompt, _ in batch]
        batches += [found[at : at + size] for at in range(0, len(found), size)]
    return batches


SHAPES = dict(
    seed=st.integers(0, 2**16),
    size=st.integers(1, 5),
    group=st.integers(1, 4),
    steps=st.integers(1, 7),
    over=st.sampled_from([1.0, 1.2, 1.25, 1.5, 2.0, 3.0]),
    dispatch=st.integers(1, 7),
    replicas=st.integers(1, 3),
)


@settings(max_examples=60, deadline=None)
@given(mode=st.sampled_from(["verify", "recompute", "restart"]), together=st.integers(1, 3), **SHAPES)
def test_batches_are_the_twins(mode, together, seed, size, group, steps, over, dispatch, replicas):
    prompts = ToyPrompts(17, seed)
    scheduler = policy(
        "tail_batching",
        prompts,
        steps=steps,
        prompts=size,
        group_size=group,
        over=over,
        prefix_mode=mode,
        long_batches=together,
        replicas=replicas,
    )
    learner = turn(scheduler, RacingEngine(steps=dispatch, replicas=replicas), steps)
    assert [names(part) for part in learner.parts] == twin(
        prompts, steps=steps, size=size, samples=group, kept=group, over=over, redraws=False, together=together
    )


@settings(max_examples=40, deadline=None)
@given(more=st.sampled_from([1.0, 1.25, 1.5]), **SHAPES)
def test_batches_of_rollpacker_are_the_twins(more, seed, size, group, steps, over, dispatch, replicas):
    prompts = ToyPrompts(17, seed)
    scheduler = policy(
        "rollpacker",
        prompts,
        steps=steps,
        prompts=size,
        group_size=group,
        over=over,
        over_samples=more,
        replicas=replicas,
    )
    engine = RacingEngine(steps=dispatch, replicas=replicas)
    learner = turn(scheduler, engine, steps)
    launched = math.ceil(more * group - 1e-9)
    assert [names(part) for part in learner.parts] == twin(
        prompts, steps=steps, size=size, samples=launched, kept=group, over=over, redraws=True
    )
    assert all(len(g.rollouts) == group for part in learner.parts for g in part)
    used = sum(len(r) for part in learner.parts for g in part for r in g.rollouts)
    assert scheduler.metrics()["sched/num_tokens_discarded"] == engine.generated - used


@settings(max_examples=40, deadline=None)
@given(
    seed=st.integers(0, 2**16),
    slots=st.integers(1, 30),
    order=st.one_of(st.none(), st.integers(0, 99)),
    mode=st.sampled_from(["verify", "recompute", "restart"]),
    over=st.sampled_from([1.2, 1.5, 2.5]),
    steps=st.integers(1, 9),
)
def test_frozen_weights_train_on_what_sync_trains_on(seed, slots, order, mode, over, steps):
    prompts = ToyPrompts(11, seed)
    ours = turn(
        policy("tail_batching", prompts, steps=steps, over=over, prefix_mode=mode),
        RacingEngine(slots=slots, order=order),
        steps,
    )
    sync = turn(policy("sync", prompts, steps=steps), RacingEngine(), steps)
    assert trained(ours) == trained(sync)


def test_over_one_decides_as_sync():
    logs = []
    for name, more in (("sync", {}), ("tail_batching", {"over": 1.0})):
        lines = []
        turn(Recorder(policy(name, **more), lines.append), RacingEngine(order=3, slots=7), 6)
        logs.append(lines)
    assert logs[0] == logs[1]


@pytest.mark.parametrize("over, period", [(1.125, 9), (1.25, 5), (1.5, 3), (2.0, 2)])
def test_the_period_is_that_of_the_paper(over, period):
    """1/(eta - 1) short rounds and a long one (arXiv 2509.21009, figure 4)."""
    scheduler, kinds = policy("tail_batching", ToyPrompts(500), steps=3 * period, prompts=8, over=over), []

    class Watched:
        def __getattr__(self, name):
            return getattr(scheduler, name)

        def take(self):
            parts = scheduler.take()
            kinds.extend([scheduler.metrics()["sched/num_long_rounds"]] if parts else [])
            return parts

    turn(Watched(), RacingEngine(), 3 * period)
    assert kinds == ([0.0] * (period - 1) + [1.0]) * 3


def drifting(mode, **more):
    scheduler, engine = (
        policy("tail_batching", ToyPrompts(23), steps=9, prefix_mode=mode, **more),
        RacingEngine(drift=0.1),
    )
    return turn(scheduler, engine, 9), scheduler.metrics(), engine


def test_under_drift_verify_is_restart_and_recompute_keeps_versions():
    (verify, counted, one), (restart, again, two), (kept, _, _) = (
        drifting(m) for m in ("verify", "restart", "recompute")
    )
    deferred = 0
    for step, (a, b, c) in enumerate(zip(verify.parts, restart.parts, kept.parts, strict=True)):
        assert names(a) == names(b)
        for group in (*a, *b):
            for rollout in group.rollouts:
                assert set(rollout.versions.tolist()) == {step}
                assert np.array_equal(rollout.tokens, text(rollout.id.seed(), step, 0.1, 24))
        assert [r.tokens.tolist() for g in a for r in g.rollouts] == [r.tokens.tolist() for g in b for r in g.rollouts]
        for rollout in (r for g in c for r in g.rollouts):
            first = int(rollout.versions[0])
            deferred += first < step
            old = int((rollout.versions == first).sum())
            assert np.array_equal(rollout.tokens[:old], text(rollout.id.seed(), first, 0.1, 24)[:old])
    assert deferred > 5
    # What verify throws away is what no longer agrees, restart all that was deferred; the rest was generated once.
    used = sum(len(r) for part in verify.parts for g in part for r in g.rollouts)
    assert 0 < counted["sched/num_tokens_discarded"] == one.generated - used
    assert again["sched/num_tokens_discarded"] == again["sched/num_tokens_deferred"] == two.generated - used
    assert counted["sched/num_tokens_discarded"] < again["sched/num_tokens_discarded"]


def test_a_long_round_of_two_batches_is_trained_on_one_after_the_other():
    """Over 1.5: after four short rounds eight groups queue; they are two batches of one generation, the second of which is a
    step old when it is trained on. Weights are published once."""
    parts = []

    class Watched:
        def __getattr__(self, name):
            return getattr(scheduler, name)

        def take(self):
            found = scheduler.take()
            parts.extend([found] if found else [])
            return found

    scheduler = policy("tail_batching", ToyPrompts(40), steps=6, long_batches=2)
    learner = turn(Watched(), RacingEngine(drift=0.05), 6)
    assert [[(len(p.fresh), len(p.groups), p.commit, p.publish) for p in found] for found in parts] == [
        [(4, 4, True, True)]
    ] * 4 + [[(8, 4, True, False), (0, 4, True, True)]]
    versions = [{int(v) for g in part for r in g.rollouts for v in r.versions} for part in learner.parts]
    assert versions == [{0}, {1}, {2}, {3}, {4}, {4}] and scheduler.metrics()["sched/num_rounds"] == 6


def test_a_race_by_hand():
    """Two wanted of three: the group of the long answer queues, whole, and goes on two rounds later."""
    prompts = ToyPrompts(9)
    scheduler = policy("tail_batching", prompts, steps=3, prompts=2, group_size=2, over=1.5)
    engine = RacingEngine(steps=1)
    first = scheduler.admit(engine.capacity, 0)
    assert [r.rollout_id.prompt_id for r in first] == [prompts.at(p)[1].id for p in (0, 0, 1, 1, 2, 2)]
    a, b, c = first[0:2], first[2:4], first[4:6]
    done = {request.rollout_id: rollout for request, rollout in zip(first, whole(first))}
    assert not scheduler.complete(done[a[0].rollout_id]).park and not scheduler.complete(done[c[0].rollout_id]).park
    assert not scheduler.complete(done[c[1].rollout_id]).park and scheduler.due() == []
    stop = scheduler.complete(done[b[0].rollout_id])
    assert stop == type(stop)()
    stop = scheduler.complete(done[b[1].rollout_id])  # the second whole group: the race is over
    assert stop.park == (a[1].rollout_id,)
    scheduler.parked([])  # it had finished in the same dispatch:
    assert scheduler.complete(done[a[1].rollout_id]) == type(stop)()
    assert names(scheduler.due()) == [prompts_key(b), prompts_key(c)]
    assert scheduler.metrics()["sched/num_groups_deferred"] == 1 and sorted(r.id for r in scheduler.held()) == sorted(
        r.rollout_id for r in (*b, *c)
    )


def prompts_key(requests):
    return requests[0].rollout_id.epoch, requests[0].rollout_id.prompt_id


def past(lengths):
    return (
        Past(
            epoch=0,
            tokens=np.zeros(sum(lengths), np.int32),
            argmax_tokens=np.zeros(sum(lengths), np.int32),
            offsets=np.cumsum([0, *lengths]),
            rewards=np.zeros(len(lengths)),
            scored=np.ones(len(lengths), bool),
            versions=np.zeros(len(lengths), np.int32),
        ),
    )


def test_prompts_that_were_long_go_to_the_queue_at_once():
    """The first round knows no limit. After it, of the four prompts beyond a batch of four at most two go straight, the
    longest first, and only those whose last answers were beyond the limit."""
    prompts, known = ToyPrompts(60), {}
    scheduler = policy("tail_batching", prompts, steps=9, over=2.0, lane=0.5, past=lambda id: known.get(id, ()))
    known |= {prompts.at(p)[1].id: past([1000, 1, 1]) for p in range(8)}
    engine = RacingEngine()
    assert len(scheduler.admit(engine.capacity, 0)) == 8 * 3
    scheduler = policy("tail_batching", prompts, steps=9, over=2.0, lane=0.5, past=lambda id: known.get(id, ()))
    learner = turn(scheduler, engine, 1)
    limit = max(len(r) for g in learner.parts[0] for r in g.rollouts)
    known |= {prompts.at(p)[1].id: past([1, limit, 1]) for p in range(8, 16)}
    known |= {prompts.at(p)[1].id: past([1, 1, limit + n]) for n, p in ((1, 9), (3, 11), (2, 14))}
    scheduler._queue.clear()  # so that the next round is a short one
    requests = scheduler.admit(engine.capacity, engine.clock)
    launched = dict.fromkeys(r.rollout_id.prompt_id for r in requests)
    assert list(launched) == [prompts.at(p)[1].id for p in (8, 9, 10, 12, 13, 15)]
    assert [key[1] for key in scheduler._queue] == [prompts.at(p)[1].id for p in (11, 14)]
    assert scheduler.metrics()["sched/num_groups_sent_long"] == 2


def test_ids_twice_in_an_epoch_are_refused_across_the_queue():
    prompts = ToyPrompts(9)
    scheduler = policy("tail_batching", prompts, steps=3, prompts=2, group_size=2, over=1.5)
    turn(scheduler, RacingEngine(), 1)
    _, name = next(iter(scheduler._queue))
    prompts.prompts = [type(p)(id=name, tokens=p.tokens) for p in prompts.prompts]
    with pytest.raises(ValueError, match=f"'{name}' appears twice in epoch 0"):
        scheduler.admit(RacingEngine().capacity, 0)


@pytest.mark.parametrize(
    "name, changed, said",
    [
        ("tail_batching", {"over": 0.9}, "scheduler.over=0.9 must be at least 1"),
        (
            "tail_batching",
            {"prefix_mode": "keep"},
            "scheduler.prefix_mode must be one of recompute, verify, restart, got 'keep'",
        ),
        ("rollpacker", {"over_samples": 0.5}, "scheduler.over_samples=0.5 must be at least 1"),
    ],
)
def test_settings_that_make_no_sense(name, changed, said):
    with pytest.raises(ValueError, match=said):
        policy(name, **changed)


def test_rollpacker_learns_from_shorter_answers_and_redraws():
    prompts = ToyPrompts(400)
    engine = RacingEngine()
    learner = turn(policy("rollpacker", prompts, steps=40, over=1.25, over_samples=1.34), engine, 40)
    sync = turn(policy("sync", prompts, steps=40), RacingEngine(), 40)
    lengths = [np.mean([len(r) for part in run.parts for g in part for r in g.rollouts]) for run in (learner, sync)]
    assert lengths[0] < 0.85 * lengths[1]
    attempts = Counter(r.id.attempt for part in learner.parts for g in part for r in g.rollouts)
    assert attempts == {0: 32 * 12, 1: 8 * 12}  # every fifth round is a long one
