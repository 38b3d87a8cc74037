"""Synchronous rounds against a brute-force twin, under random completion orders, accuracies and failing graders."""

import dataclasses
from collections import Counter
from fractions import Fraction
from math import ceil
from zlib import crc32

import numpy as np
import plain_rollouts
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from toy_ring import SAMPLING, ToyPrompts, scheduler_of

from jaxrl_post.ring.types import Capacity, Group
from jaxrl_post.scheduler.group_filter import NoGroups, Solved, differs
from jaxrl_post.scheduler.rounds.rounds import Sync

FREE = Capacity(slots=(4,), pages=(4,))


def make(order, kind=Sync, **changed):
    given = dict(prompts=4, group_size=3, max_tokens=5, filter_groups=True, filter_metric="acc", max_waves=50)
    return scheduler_of(kind, order, **given | changed)


def answer(request, clock):
    n = 1 + int(request.seed[0]) % 4
    zeros = np.zeros(n)
    return plain_rollouts.rollout(request.rollout_id, request.prompt, zeros + 1, clock=(0, clock))


def score(group, accuracy):
    marks = [accuracy(r.id) for r in group.rollouts]
    acc = [0.0 if m is None else m for m in marks]
    # The shaped reward differs within every group: only the accuracy may decide.
    return dataclasses.replace(
        group,
        rewards=np.array(acc) + np.arange(len(acc)),
        scored=[m is not None for m in marks],
        components={"acc": acc},
    )


def test_the_last_sample_of_a_group_has_the_law_of_the_baseline():
    greedy = dataclasses.replace(SAMPLING, temperature=0.0)
    asked = make(ToyPrompts(8), baseline=greedy).admit(FREE, 0)
    assert len(asked) == 12 and all((r.sampling is greedy) == (r.rollout_id.sample == 2) for r in asked)
    assert all(request.sampling is SAMPLING for request in make(ToyPrompts(8)).admit(FREE, 0))


def drive(scheduler, accuracy, order):
    """Completes in a random order, scores in a random order; the batches, and how every group ended."""
    rng, batches, counts, waiting, admitted = np.random.default_rng(order), [], Counter(), [], []
    for clock in range(1, 10_001):
        new = scheduler.admit(FREE, clock - 1)
        admitted += [request.rollout_id for request in new]
        waiting += new
        rng.shuffle(waiting)
        count = int(rng.integers(1, 6))
        for request in waiting[:count]:
            stop = scheduler.complete(answer(request, clock))
            assert stop.park == ()
        waiting = waiting[count:]
        due = scheduler.due()
        for index in rng.permutation(len(due)):
            scheduler.scored(score(due[index], accuracy))
        parts = scheduler.take()
        batches += [[(g.rollouts[0].id.epoch, g.prompt.id) for g in part.groups] for part in parts]
        for part in parts:
            assert part.fresh == part.groups and part.commit and part.publish
            assert all([r.id.sample for r in g.rollouts] == list(range(len(g.rollouts))) for g in part.groups)
        counts.update(scheduler.metrics())
        if not waiting and not due and not scheduler.admit(FREE, clock):
            break
    return batches, counts, admitted


def test_groups_are_scored_in_order_of_admission():
    """Whoever completed first: graders are asked, and scores journaled, in one order."""
    scheduler = make(ToyPrompts(11))
    requests = scheduler.admit(FREE, 0)
    for request in reversed(requests):
        scheduler.complete(answer(request, 1))
    assert [g.prompt.id for g in scheduler.due()] == list(dict.fromkeys(r.prompt.id for r in requests))


def twin(prompts, accuracy, *, steps, size, group_size, filter_groups):
    """The same rounds from the definition: no state machine, accuracies known beforehand."""

    def kept(position):
        epoch, prompt = prompts.at(position)
        marks = [accuracy((7, "train", epoch, prompt.id, s, 0)) for s in range(group_size)]
        return not filter_groups or len({m for m in marks if m is not None}) > 1

    position, batches, filtered, refused, waves = 0, [], 0, 0, 0
    for _ in range(steps):
        good, first, wave = [], position, size
        while True:
            good += [p for p in range(position, position + wave) if kept(p)]
            position, waves = position + wave, waves + 1
            if len(good) >= size:
                break
            seen = position - first
            wave = min(size, ceil((size - len(good)) * Fraction(seen, max(len(good), 1))))
            if waves > 500:
                return None
        batches.append([(prompts.at(p)[0], prompts.at(p)[1].id) for p in good[:size]])
        filtered, refused = filtered + position - first - len(good), refused + len(good) - size
    return batches, position, filtered, refused, waves


def accuracies(seed, rate, failing):
    def accuracy(id):
        rng = np.random.default_rng((seed, crc32(repr(tuple(id)).encode())))
        return None if rng.random() < failing else float(rng.random() < rate)

    return accuracy


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 2**20),
    order=st.integers(0, 2**20),
    size=st.integers(1, 5),
    group_size=st.integers(1, 4),
    count=st.integers(1, 7),
    steps=st.integers(1, 4),
    filter_groups=st.booleans(),
    rate=st.sampled_from([0.2, 0.5, 0.9]),
    failing=st.sampled_from([0.0, 0.3]),
)
def test_batches_are_the_twins_whatever_the_order(
    seed, order, size, group_size, count, steps, filter_groups, rate, failing
):
    filter_groups = filter_groups and group_size > 1
    prompts, accuracy = ToyPrompts(count, seed), accuracies(seed, rate, failing)
    expected = twin(prompts, accuracy, steps=steps, size=size, group_size=group_size, filter_groups=filter_groups)
    if expected is None:
        return
    check(Sync, prompts, accuracy, order, expected, steps, size, group_size, filter_groups)


def check(kind, prompts, accuracy, order, expected, steps, size, group_size, filter_groups):
    scheduler = make(
        prompts, kind, steps=steps, prompts=size, group_size=group_size, filter_groups=filter_groups, max_waves=10_000
    )
    batches, counts, admitted = drive(scheduler, accuracy, order)
    want, used, filtered, refused, waves = expected
    assert batches == want
    assert admitted == [
        (7, "train", prompts.at(p)[0], prompts.at(p)[1].id, s, 0) for p in range(used) for s in range(group_size)
    ]
    got = {name.removeprefix("sched/num_"): int(value) for name, value in counts.items()}
    assert got["groups_trained"] + got["groups_filtered"] + got["groups_refused"] == got["groups_admitted"] == used
    assert (got["groups_filtered"], got["groups_refused"], got["waves"]) == (filtered, refused, waves)
    assert got["groups_trained"] == steps * size and got["rounds"] == steps
    assert got["rollouts_completed"] == got["rollouts_admitted"] == used * group_size
    unscored = sum(accuracy(id) is None for id in admitted)
    assert got["rollouts_unscored"] == unscored


class ByScore(Sync):
    """Planted fault: the batch in the order in which scores came back."""

    def scored(self, group):
        key = (group.rollouts[0].id.epoch, group.prompt.id)
        self._open[key] = self._open.pop(key)
        super().scored(group)


class Early(Sync):
    """Planted fault: refills before the whole wave is scored."""

    def admit(self, capacity, clock):
        first = super().admit(capacity, clock)
        return first or (self._open_group() if any(g.group for g in self._open.values()) or clock == 3 else [])


class OnReward(Sync):
    """Planted fault: the filter reads the shaped reward."""

    def scored(self, group):
        super().scored(dataclasses.replace(group, components={}))


class Unmasked(Sync):
    """Planted fault: an unscored rollout counts as a wrong one."""

    def scored(self, group):
        super().scored(dataclasses.replace(group, scored=np.ones(len(group.rollouts), bool)))


class Forgets(Sync):
    """Planted fault: surplus groups vanish without being counted."""

    def metrics(self):
        return super().metrics() | {"sched/num_groups_refused": 0.0}


class BySampleCompletion(Sync):
    """Planted fault: rollouts by completion, not by sample index."""

    def _unscored(self, group):
        whole = super()._unscored(group)
        return dataclasses.replace(whole, rollouts=tuple(group.rollouts.values()))


@pytest.mark.parametrize("kind", [ByScore, Early, OnReward, Unmasked, Forgets, BySampleCompletion])
def test_planted_faults_fail(kind):
    prompts, accuracy = ToyPrompts(40, 3), accuracies(5, 0.4, 0.3)
    expected = twin(prompts, accuracy, steps=4, size=5, group_size=3, filter_groups=True)
    assert expected[2] > 0 and expected[3] > 0
    check(Sync, prompts, accuracy, 11, expected, 4, 5, 3, True)
    with pytest.raises((AssertionError, KeyError)):
        check(kind, prompts, accuracy, 11, expected, 4, 5, 3, True)


def test_a_wave_by_hand():
    """4 wanted; 1 of 4 differs, so the keep rate 1/4 asks for min(4, 3 * 4) more; 3 of those differ: full."""
    prompts, good = ToyPrompts(100), {2, 5, 6, 7}
    place = {prompts.at(p)[1].id: p for p in range(100)}

    def accuracy(id):
        return float(id[4] == 0) if place[id[3]] in good else 1.0

    scheduler = make(prompts, steps=1)
    batches, counts, admitted = drive(scheduler, accuracy, 0)
    assert [[place[id] for _, id in batch] for batch in batches] == [[2, 5, 6, 7]]
    assert counts["sched/num_waves"] == 2 and counts["sched/num_groups_filtered"] == 4
    assert len(admitted) == 8 * 3


@pytest.mark.parametrize("mini_batches, ppo_epochs", [(1, 1), (2, 1), (4, 3)])
def test_parts_of_a_round(mini_batches, ppo_epochs):
    """Every group once per epoch, in admission order; fresh once, first; published once, last."""
    parts = []

    class Keeping(Sync):
        def take(self):
            found = super().take()
            parts.extend([found] if found else [])
            return []

    scheduler = make(ToyPrompts(9), Keeping, mini_batches=mini_batches, ppo_epochs=ppo_epochs, filter_groups=False)
    drive(scheduler, lambda id: 1.0, 0)
    assert len(parts) == 3
    for found in parts:
        assert len(found) == mini_batches * ppo_epochs and all(part.commit for part in found)
        assert [len(part.fresh) for part in found] == [4] + [0] * (len(found) - 1)
        assert [part.publish for part in found] == [False] * (len(found) - 1) + [True]
        assert [g for part in found for g in part.groups] == list(found[0].fresh) * ppo_epochs
        assert {len(part.groups) for part in found} == {4 // mini_batches}


def test_mini_batches_must_divide_a_round():
    with pytest.raises(ValueError, match="scheduler.mini_batches=3 must divide scheduler.prompts=4"):
        make(ToyPrompts(9), mini_batches=3)


def test_requests_hold_their_own_seed_and_settings():
    scheduler = make(ToyPrompts(9), replicas=2)
    requests = scheduler.admit(Capacity(slots=(4, 4), pages=(4, 4)), 0)
    assert [r.rollout_id.sample for r in requests] == [0, 1, 2] * 4
    assert [r.replica for r in requests[::3]] == [0, 1, 0, 1]
    assert all(r.replica == requests[3 * (i // 3)].replica for i, r in enumerate(requests))
    assert all(
        np.array_equal(r.seed, r.rollout_id.seed()) and r.max_tokens == 5 and r.sampling is SAMPLING for r in requests
    )
    assert len({tuple(r.seed.tolist()) for r in requests}) == 12
    assert (
        scheduler.admit(Capacity(slots=(4, 4), pages=(4, 4)), 1) == []
        and scheduler.due() == []
        and scheduler.take() == []
    )


def test_a_round_that_never_fills_says_so():
    scheduler = make(ToyPrompts(9), max_waves=2)
    with pytest.raises(
        NoGroups,
        match=r"scheduler.filter_groups kept 0 of the 4 groups of round 1 after "
        r"scheduler.max_waves=2 waves \(8 groups scored\)",
    ):
        drive(scheduler, lambda id: 1.0, 0)


@pytest.mark.parametrize(("later", "ends"), [(1.0, Solved), (0.0, NoGroups)])
def test_a_run_that_has_solved_its_prompts_ends_well_and_one_that_fails_them_does_not(later, ends):
    """Both trained on a round before. Rewards that never differed may be constant, and are no end of a run."""
    prompts = ToyPrompts(9)
    first = {prompts.at(place)[1].id for place in range(4)}
    scheduler = make(prompts, max_waves=2)
    with pytest.raises(ends, match="kept 0 of the 4 groups of round 2"):
        drive(
            scheduler, lambda id: float(id.sample % 2) if (id.epoch, id.prompt_id in first) == (0, True) else later, 0
        )


def test_ids_twice_in_an_epoch_are_refused():
    prompts = ToyPrompts(4)
    prompts.prompts[1] = prompts.prompts[0]
    with pytest.raises(ValueError, match="'p0' appears twice in epoch 0"):
        make(prompts).admit(FREE, 0)


def test_differs_by_hand():
    prompt = ToyPrompts(1).prompts[0]
    scheduler = make(ToyPrompts(9), prompts=1)
    rollouts = tuple(answer(r, 0) for r in scheduler.admit(FREE, 0))
    prompt = rollouts[0].prompt

    def group(rewards, scored):
        return Group(prompt=prompt, rollouts=rollouts, rewards=rewards, scored=scored)

    assert differs(group([0, 1, 1], [1, 1, 1])) and not differs(group([1, 1, 1], [1, 1, 1]))
    assert not differs(group([0, 1, 1], [0, 1, 1])) and not differs(group([0, 1, 1], [1, 0, 0]))
    assert not differs(group([0, 1, 1], [0, 0, 0]))
