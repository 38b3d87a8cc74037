"""The curriculum: its draws against brute force and a plain twin, its filter, and every promise of the schedulers with it."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from made_groups import rollout
from racing_ring import RacingEngine, policy, trained, turn
from test_scheduler_properties import grade
from toy_ring import ToyEngine, ToyPrompts, scheduler_of
from witness import Restarting, Witness, written_and_read

from jaxrl_post.data.prompts import Mixture
from jaxrl_post.ring.history import History
from jaxrl_post.ring.types import Group, Prompt
from jaxrl_post.scheduler.curriculum import INTERESTS, Choice, Curricular, Curriculum, inclusion, systematic
from jaxrl_post.scheduler.pipeline import Pipeline
from jaxrl_post.scheduler.rounds.around import AroundScheduler


class Fixed:
    """A generator whose order and start are given."""

    def __init__(self, order, start):
        self._order, self._start = np.array(order), start

    def permutation(self, count):
        return self._order

    def random(self):
        return self._start


@settings(max_examples=60, deadline=None)
@given(
    interest=st.lists(st.sampled_from([0.0, 0.1, 0.25, 1.0, 9.0]), min_size=1, max_size=8),
    data=st.data(),
    uniform=st.sampled_from([0.01, 0.1, 1.0]),
)
def test_chances_sum_to_the_draws_and_follow_the_interest(interest, data, uniform):
    count = data.draw(st.integers(1, len(interest)))
    chances = inclusion(np.array(interest), count, uniform)
    assert chances.sum() == pytest.approx(count) and np.all(chances > 0) and np.all(chances <= 1)
    total = sum(interest) or len(interest)
    mass = [uniform / len(interest) + (1 - uniform) * (one / total if any(interest) else 1 / total) for one in interest]
    free = np.flatnonzero(chances < 1)
    for i, j in itertools.pairwise(free):
        assert chances[i] * mass[j] == pytest.approx(chances[j] * mass[i])
    for i in np.flatnonzero(chances == 1):  # what is drawn for sure has more of it than all others
        assert all(mass[i] >= mass[j] - 1e-12 for j in free)


def test_each_prompt_is_drawn_with_its_chance_and_the_weights_are_unbiased():
    """All orders of five prompts, and every start of a fine grid: the exact law up to the grid."""
    interest = np.array([0.0, 0.2, 0.25, 0.05, 0.09])
    chances = inclusion(interest, 3, 0.1)
    values, hits, estimates = np.array([3.0, -1.0, 0.5, 8.0, 2.0]), np.zeros(5), []
    starts = (np.arange(400) + 0.5) / 400
    for order in itertools.permutations(range(5)):
        for start in starts:
            drawn = systematic(chances, Fixed(order, start))
            assert len(drawn) == 3 == len(set(drawn)) and np.all(np.diff(drawn) > 0)
            hits[drawn] += 1
            weights = 3 / (5 * chances[drawn])
            estimates.append((weights * values[drawn]).mean())
    assert hits / (120 * 400) == pytest.approx(chances, abs=1e-3)
    assert np.mean(estimates) == pytest.approx(values.mean(), abs=2e-2)
    assert abs(values[[0, 1, 2]].mean() - values.mean()) > 1  # a biased draw is far off


def group(prompt: Prompt, epoch: int, rewards, scored=None) -> Group:
    rollouts = tuple(rollout(prompt, i, [1]) for i in range(len(rewards)))
    for one in rollouts:
        object.__setattr__(one, "id", one.id._replace(epoch=epoch))
    return Group(prompt=prompt, rollouts=rollouts, rewards=rewards, scored=scored or [1] * len(rewards))


def pass_of(order: Curriculum, begin: int, count: int) -> list[tuple[int, str]]:
    return [(epoch, prompt.id) for epoch, prompt in map(order.at, range(begin, begin + count))]


def test_the_filter_skips_solved_and_hopeless_prompts_for_some_of_their_epochs():
    base, history = ToyPrompts(6), History(epochs=4, max_bytes=1 << 20)
    order = Curriculum(base, 6, Choice(skip_epochs=2), 0, history.of)
    first = pass_of(order, 0, 6)
    assert first == [(epoch, prompt.id) for epoch, prompt in map(base.at, range(6))]
    for prompt, rewards in zip(base.prompts, ([1, 1], [0, 0], [1, 0], [0.5, 1], [1, 1], [0, 0]), strict=True):
        history.record(group(prompt, 0, rewards, [0, 0] if prompt.id in ("p4", "p5") else None))
    begin = 6
    for epoch, left in ((1, {2, 3, 4, 5}), (2, {2, 3, 4, 5}), (3, {0, 1, 2, 3, 4, 5})):
        drawn = pass_of(order, begin, len(left))
        assert sorted(drawn) == sorted((epoch, f"p{i}") for i in left)
        begin += len(left)
    row = order.metrics()
    assert row["curriculum/num_prompts_solved"] == row["curriculum/num_prompts_hopeless"] == 2
    assert row["curriculum/num_passes"] == 4 and row["curriculum/num_prompts_planned"] == 20
    assert order.metrics()["curriculum/num_prompts_solved"] == 0


def test_a_pass_without_prompts_is_passed_over():
    base, history = ToyPrompts(3), History(epochs=2, max_bytes=1 << 20)
    order = Curriculum(base, 3, Choice(skip_epochs=3), 0, history.of)
    pass_of(order, 0, 3)
    for prompt in base.prompts:
        history.record(group(prompt, 0, [1, 1]))
    assert {epoch for epoch, _ in pass_of(order, 3, 3)} == {4}


def test_more_groups_must_agree_before_a_prompt_is_skipped():
    base, history = ToyPrompts(2), History(epochs=3, max_bytes=1 << 20)
    order = Curriculum(base, 2, Choice(skip_epochs=1, groups=2), 0, history.of)
    pass_of(order, 0, 2)
    history.record(group(base.prompts[0], 0, [1, 1]))
    assert sorted(pass_of(order, 2, 2)) == [(1, "p0"), (1, "p1")]
    history.record(group(base.prompts[0], 1, [1, 1]))
    assert pass_of(order, 4, 1) == [(2, "p1")]


@pytest.mark.parametrize("interest", ["variance", "failure"])
def test_a_pass_draws_what_a_plain_twin_draws(interest):
    base, history = ToyPrompts(40, 3), History(epochs=2, max_bytes=1 << 20)
    choice = Choice(interest=interest, share=0.5, uniform=0.2, weighted=True)
    order, noise = Curriculum(base, 40, choice, 5, history.of), np.random.default_rng(0)
    pass_of(order, 0, 20)
    rates = {}
    for prompt in base.prompts:
        rewards = (noise.random(4) < noise.random()).astype(float)
        rates[prompt.id] = rewards.mean()
        history.record(group(prompt, 0, rewards))
    window = [base.at(place)[1].id for place in range(40, 80)]
    p = np.array([rates[id] for id in window])
    law = 0.2 / 40 + 0.8 * (INTERESTS[interest](p) / INTERESTS[interest](p).sum())
    chances = 20 * law
    while np.any(chances > 1):
        chances = np.minimum(chances, 1)
        free = chances < 1
        chances[free] = (20 - np.sum(~free)) * law[free] / law[free].sum()
    noise = np.random.default_rng([5, 1, 0x70726F6D])
    shuffled, start, position, twin = noise.permutation(40), noise.random(), 0.0, []
    for i in shuffled:  # prompt i holds the stretch from `position` to `position + chances[i]`
        if np.floor(position + chances[i] - start) > np.floor(position - start):
            twin.append(i)
        position += chances[i]
    assert pass_of(order, 20, 20) == [(1, window[i]) for i in sorted(twin)]
    weights = [order.at(position)[1].weight for position in range(20, 40)]
    assert weights == pytest.approx([20 / (40 * chances[i]) for i in sorted(twin)])
    row = order.metrics()
    assert row["curriculum/weight/max"] == pytest.approx(max(weights))
    assert row["curriculum/ess"] == pytest.approx(sum(weights) ** 2 / sum(w * w for w in weights) / 20)
    assert row["curriculum/num_prompts_left"] == 40


def test_weights_reach_prompts_only_where_they_are_asked_for():
    history = History(epochs=1, max_bytes=1 << 20)
    for weighted in (False, True):
        order = Curriculum(ToyPrompts(9), 9, Choice(interest="variance", weighted=weighted), 0, history.of)
        assert {order.at(position)[1].weight for position in range(9)} == {1.0}  # nothing is known: all are alike


class Recording(AroundScheduler):
    """Records scored groups, as the ring does."""

    def __init__(self, scheduler, history):
        super().__init__(scheduler)
        self._history = history

    def scored(self, group):
        self._history.record(group)
        self._inside.scored(group)


CASES = dict(
    name=st.sampled_from(["sync", "tail_batching", "rollpacker", "pipeline"]),
    interest=st.sampled_from(list(INTERESTS)),
    share=st.sampled_from([0.3, 0.7, 1.0]),
    skip=st.integers(0, 3),
    mixed=st.booleans(),
    filtered=st.booleans(),
    seed=st.integers(0, 99),
    count=st.integers(12, 40),
    steps=st.integers(1, 8),
    every=st.sampled_from([3, 11]),
)


def base_of(case):
    if not case["mixed"]:
        return ToyPrompts(case["count"], case["seed"])
    parts = {
        name: [Prompt(id=f"{name}/{i}", tokens=[1, i + 3]) for i in range(size)]
        for name, size in (("a", 5), ("b", case["count"] - 5))
    }
    return Mixture(parts, (1.0, 2.0), case["seed"])


def live_through(case, every):
    history, base = History(epochs=2, max_bytes=1 << 20), base_of(case)
    choice = Choice(interest=case["interest"], share=case["share"], skip_epochs=case["skip"])
    more = dict(steps=case["steps"], group_size=3, filter_groups=case["filtered"], max_waves=10_000)

    def make():
        order = Curriculum(base, case["count"], choice, case["seed"], history.of)
        if case["name"] == "pipeline":
            inside = scheduler_of(Pipeline, order, prompts=4, max_staleness=2, **more)
        else:
            inside = policy(case["name"], order, **more)
        return Recording(Curricular(inside, order), history)

    chaos = Restarting(make, case["seed"], every)
    # Weights change under running rollouts in a pipeline, to which the witness objects.
    witness = Witness(chaos, group_size=3) if case["name"] != "pipeline" else chaos
    kind = RacingEngine if case["name"] != "pipeline" else ToyEngine
    learner = turn(witness, kind(slots=20, order=case["seed"]), case["steps"], grade(0.2))
    return witness, learner


@settings(max_examples=10, deadline=None)
@given(case=st.fixed_dictionaries(CASES))
def test_every_promise_holds_and_a_restart_at_any_point_changes_nothing(case):
    calm, learned = live_through(case, 0)
    again, learned_again = live_through(case, case["every"])
    told = trained(learned)
    assert trained(learned_again) == told and len({id for id, _ in told}) == len(told) == 12 * case["steps"]
    if case["name"] != "pipeline":
        assert again.lines == calm.lines
        ends = [one.settle(size=4, steps=case["steps"], filtered=True) for one in (calm, again)]
        assert ends[0] == ends[1]


def test_a_curriculum_that_is_not_saved_is_found(monkeypatch):
    """The planted fault: a restart plans anew from what is known by then."""
    case = dict(name="sync", interest="variance", share=0.3, skip=0, mixed=False, filtered=False, seed=1, count=24)
    case |= dict(steps=8, every=3)
    calm, _ = live_through(case, 0)
    assert live_through(case, 3)[0].lines == calm.lines
    monkeypatch.setattr(Curriculum, "load_state_dict", lambda self, state: None)
    with pytest.raises((AssertionError, KeyError)):
        assert live_through(case, 3)[0].lines == calm.lines


def test_a_state_goes_on_as_the_curriculum_that_gave_it():
    history = History(epochs=1, max_bytes=1 << 20)
    one, two = (Curriculum(ToyPrompts(9), 9, Choice(interest="failure", share=0.5), 0, history.of) for _ in range(2))
    pass_of(one, 0, 10)
    history.record(group(ToyPrompts(9).prompts[0], 0, [1, 1]))
    two.load_state_dict(written_and_read(one.state_dict()))
    assert pass_of(two, 0, 30) == pass_of(one, 0, 30) and two.metrics() == one.metrics()
