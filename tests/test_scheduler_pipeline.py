"""The pipeline: no token older than its bound, nothing dropped, oldest first, full slots, under random engines, filters and
restarts; with bound 0 it is the synchronous ring. Each promise objects to its planted fault."""

import functools
from collections import Counter

import made_groups
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from racing_ring import RacingEngine, accuracy, names, policy, trained, turn
from test_scheduler_properties import grade
from toy_ring import ToyPrompts, scheduler_of
from witness import Restarting, Wandering

from jaxrl_post.ring.types import Capacity
from jaxrl_post.scheduler import pipeline
from jaxrl_post.scheduler.placement.placement import LeastLoaded

CASES = dict(
    seed=st.integers(0, 2**16),
    size=st.integers(1, 5),
    group=st.integers(1, 4),
    steps=st.integers(1, 9),
    count=st.integers(4, 40),
    staleness=st.integers(0, 5),
    ahead=st.integers(0, 9),
    unscored=st.integers(0, 12),
    ready=st.one_of(st.just(0), st.integers(1, 12)),
    filtered=st.booleans(),
    wander=st.booleans(),
    replicas=st.integers(1, 3),
    slots=st.integers(1, 40),
    dispatch=st.integers(1, 6),
    order=st.one_of(st.none(), st.integers(0, 99)),
    drift=st.sampled_from([0.0, 0.05]),
    every=st.sampled_from([3, 11, 50]),
    failing=st.sampled_from([0.0, 0.2]),
    late=st.integers(0, 30),
    pieces=st.integers(1, 6),
)


class PipedEngine(RacingEngine):
    """New weights go under what runs."""

    def swap(self, params, version, finite=None):
        assert version > self.version
        self.version = version


class Late:
    """A Pace: every step keeps its weights back for so many engine steps, and is handed over in so many pieces."""

    def __init__(self, steps, pieces=1):
        self._steps, self._pieces = steps, pieces

    def steps(self, groups):
        return float(self._steps)

    def pieces(self, groups):
        return min(self._pieces, len(groups))


class Judge:
    """A scheduler around a Pipeline that objects (AssertionError) to a broken promise and keeps every decision."""

    def __init__(self, make, *, size, group, staleness, ahead, unscored, ready=0, every=0, seed=0):
        self._size, self._group, self._bound, self._ahead, self._ready = size, group, staleness, ahead, ready
        self._unscored, self._scheduler = unscored or size, Restarting(make, seed, every)
        self.lines, self.open, self.whole, self.ended = [], {}, {}, Counter()
        self._got, self._kept, self._asked = Counter(), {}, set()
        self._due = []  # begun and not handed over
        self.ages = []  # of trained tokens
        self.step = self.version = self.slots = self.oldest = 0

    @property
    def restarts(self):
        return self._scheduler.restarts

    def __getattr__(self, name):
        return getattr(self._scheduler, name)

    def admit(self, capacity, clock):
        self.slots, before = self.slots or sum(capacity.slots), set(self.open)
        requests = self._scheduler.admit(capacity, clock)
        for key in map(tuple, self._scheduler_open()):  # what a placement holds back is open too: its time runs
            assert not self.ended[key], f"{key} ended already"
            self.open.setdefault(key, self.version)
        assert all((request.rollout_id.epoch, request.prompt.id) in self.open for request in requests), (
            "of no open group"
        )
        flying = sum(self._group - self._got[key] for key in self.open)
        full = flying >= self.slots + self._ahead
        most = self._size * (min(self.version + self._bound, self.steps - 1) - self.step + 1)
        waiting = bool(self._ready) and len(self.whole) >= self._ready
        assert full or self.wanders or len(self.open) >= most or waiting, (
            "a slot is empty that the bound would allow to be filled"
        )
        assert not (waiting and self.open.keys() - before), "a group is begun while enough of them wait for the learner"
        assert len(self.open) <= most, "more groups are open than can be trained on in time"
        self.lines.append(("admit", clock, [(tuple(r.rollout_id), r.replica) for r in requests]))
        return requests

    def complete(self, rollout):
        key = rollout.id.epoch, rollout.id.prompt_id
        self._got[key] += 1
        if self._got[key] == self._group:
            self.whole[key] = len(self.whole)
        return self._scheduler.complete(rollout)

    def due(self):
        groups = self._scheduler.due()
        self._asked |= {_key(group) for group in groups}
        assert len(self.whole.keys() - self._asked) <= max(self._unscored, self._size), (
            "too many groups are whole and not asked for"
        )
        self.lines.append(("due", [_key(group) for group in groups]))
        return groups

    def scored(self, group):
        self._scheduler.scored(group)
        if _key(group) in [tuple(key) for key in self._scheduler_open()]:
            self._kept[_key(group)] = group
        else:
            self._end(_key(group))

    def _scheduler_open(self):
        return self._scheduler._scheduler._open.keys()

    def take(self):
        parts = self._scheduler.take()
        for part in parts:
            keys = [_key(group) for group in part.fresh]
            order = [key for key in self.open if key in self._kept]
            assert part.commit or not part.publish
            assert part.fresh or part.groups or part.commit, "a part of nothing"
            self._due += keys
            handed, self._due = self._due[: len(part.groups)], self._due[len(part.groups) :]
            assert handed == [_key(group) for group in part.groups], "not what the step has begun with"
            assert not (part.commit and self._due), "a step ends without some of its groups"
            if part.fresh:
                assert keys == order[: self._size], "not the oldest whole groups"
                for group in part.fresh:
                    assert [r.id.sample for r in group.rollouts] == list(range(self._group))
                    ages = np.concatenate([self.step - r.versions for r in group.rollouts])
                    assert ages.min() >= 0 and ages.max() <= self._bound, "a token is older than the bound"
                    self.oldest = max(self.oldest, int(ages.max()))
                    self.ages += ages.tolist()
                    self._end(_key(group))
                self.step += 1
                assert self._in_time(), "a group can no longer be trained on in time"
            if part.publish:
                self.version = self.step
        if not parts and self.version == self.step < self.steps and len(self._kept) >= self._size:
            before, order = dict(self.open), [key for key in self.open if key in self._kept]
            self.open = {key: version for key, version in self.open.items() if key not in order[: self._size]}
            self.step += 1
            assert not self._in_time(), "it waits for nobody"
            self.step, self.open = self.step - 1, before
        self.lines.append(("take", [[_key(group) for group in part.groups] for part in parts]))
        return parts

    def _in_time(self):
        """By playing on: every later step takes those with the least time left, all of them being whole."""
        left, step = sorted(min(version + self._bound, self.steps - 1) for version in self.open.values()), self.step
        while left:
            now, left = left[: self._size], left[self._size :]
            if any(last < step for last in now):
                return False
            step += 1
        return True

    def _end(self, key):
        self.ended[key] += 1
        self._kept.pop(key, None)
        self.whole.pop(key)
        del self.open[key]


piping = functools.partial(scheduler_of, pipeline.Pipeline)


def _key(group):
    return group.rollouts[0].id.epoch, group.prompt.id


def piped(case, every, **more):
    """A run under the judge: judge, learner, engine."""
    filtered, unscored = case["filtered"] and case["group"] > 1, case["unscored"] and case["unscored"] + case["size"]
    ready = case["ready"] and case["ready"] + max(unscored, case["size"])

    def make():
        return piping(
            ToyPrompts(case["count"], case["seed"]),
            steps=case["steps"],
            prompts=case["size"],
            group_size=case["group"],
            max_staleness=case["staleness"],
            ahead=case["ahead"],
            max_unscored=unscored,
            max_ready=ready,
            filter_groups=filtered,
            max_waves=10_000,
            filter_metric="acc",
            pace=Late(case["late"], case["pieces"]) if case["late"] > 9 else None,
            placement=Wandering(case["replicas"], case["seed"]) if case["wander"] else LeastLoaded(case["replicas"]),
            **more,
        )

    judge = Judge(
        make,
        size=case["size"],
        group=case["group"],
        staleness=case["staleness"],
        ahead=case["ahead"],
        unscored=unscored,
        ready=ready,
        every=every,
        seed=case["seed"],
    )
    judge.steps, judge.wanders = case["steps"], case["wander"]  # such a placement leaves slots empty as it likes
    engine = PipedEngine(
        slots=case["slots"], steps=case["dispatch"], order=case["order"], drift=case["drift"], replicas=case["replicas"]
    )
    return judge, turn(judge, engine, case["steps"], grade(case["failing"])), engine


def holds(case):
    calm, learned, _ = piped(case, 0)
    chaos, again, _ = piped(case, case["every"])
    assert chaos.lines == calm.lines and trained(again) == trained(learned)
    assert max(calm.ended.values()) == 1
    assert sum(map(len, learned.parts)) == case["size"] * case["steps"]
    if not case["filtered"] or case["group"] == 1:
        positions = [ToyPrompts(case["count"], case["seed"]).at(at) for at in range(case["size"] * case["steps"])]
        assert calm.ended == Counter((epoch, prompt.id) for epoch, prompt in positions) and not calm.open
    return calm, chaos.restarts


@settings(max_examples=40, deadline=None)
@given(case=st.fixed_dictionaries(CASES).filter(lambda case: not case["filtered"] or case["count"] >= 12))
def test_every_promise_holds(case):
    holds(case)


HELD_BACK = dict(
    seed=2,
    size=4,
    group=1,
    steps=3,
    count=4,
    staleness=1,
    ahead=0,
    unscored=0,
    ready=0,
    filtered=False,
    wander=True,
    replicas=1,
    slots=5,
    dispatch=2,
    order=None,
    drift=0.0,
    every=3,
    failing=0.0,
    late=0,
    pieces=1,
)


def test_a_group_whose_requests_a_placement_holds_back_is_waited_for():
    """One admitted under version 0 and launched under version 1 counts from its admission: the step that it must be in waits."""
    holds(HELD_BACK)


BASE = dict(
    seed=3,
    size=3,
    group=3,
    steps=9,
    count=40,
    staleness=2,
    ahead=3,
    unscored=0,
    ready=0,
    filtered=False,
    wander=False,
    replicas=2,
    slots=20,
    dispatch=2,
    order=5,
    drift=0.05,
    every=11,
    failing=0.0,
    late=0,
    pieces=1,
)


def test_the_base_of_the_planted_faults_is_sound_and_reaches_its_bound():
    judge, restarts = holds(BASE)
    assert judge.oldest == 2 and restarts > 30
    assert holds(BASE | {"filtered": True})[1] > 30 and holds(BASE | {"late": 15, "unscored": 4})[1] > 30
    assert holds(PIECES)[1] > 30


PIECES = BASE | {"late": 12, "pieces": 3}


def test_pieces_are_spread_over_the_step():
    """Steps of 12 engine steps on three groups, dispatches of 2: a group at once, one after 4 and one after 8, and the commit."""
    judge, learner, _ = piped(PIECES, 0)
    clock, handed = 0, []
    for kind, *told in judge.lines:
        clock = told[0] if kind == "admit" else clock
        handed += [(clock, len(groups)) for groups in told[0]] if kind == "take" else []
    first = [(at - handed[0][0], count) for at, count in handed[:4]]
    assert first == [(0, 1), (4, 1), (8, 1), (12, 0)]
    assert [len(groups) for groups in learner.parts][:16] == [1, 1, 1, 0] * 4
    whole = piped(PIECES | {"pieces": 1}, 0)[1]
    assert learner.batches == whole.batches and learner.params == whole.params


SLOW = BASE | {"late": 30, "staleness": 5, "steps": 12, "drift": 0.0}


def test_few_groups_wait_for_a_slow_learner():
    """A learner of 30 engine steps: tokens are fresher with a limit, and the engine needs no more steps."""
    old, _, engine = piped(SLOW, 0)
    fresh, _, limited = piped(SLOW | {"ready": 1}, 0)
    holds(SLOW | {"ready": 1})
    assert np.mean(fresh.ages) < 0.8 * np.mean(old.ages)
    assert limited.clock <= engine.clock


def one_group_too_many(patch):
    whole = pipeline.Pipeline._credit.fget
    patch.setattr(pipeline.Pipeline, "_credit", property(lambda self: whole(self) + 1))


def one_step_too_old(patch):
    whole = pipeline.Pipeline._last_step.fget
    patch.setattr(pipeline.Pipeline, "_last_step", property(lambda self: min(whole(self) + 1, self._steps - 1)))


def nobody_is_waited_for(patch):
    patch.setattr(pipeline.Pipeline, "_can_wait", lambda self: True)


def all_are_waited_for(patch):
    patch.setattr(pipeline.Pipeline, "_can_wait", lambda self: not self._flying)


def newest_first(patch):
    patch.setattr(pipeline, "_age", lambda opened: -opened.rank)


def half_the_slots(patch):
    whole = pipeline.Pipeline.admit
    patch.setattr(
        pipeline.Pipeline,
        "admit",
        lambda self, capacity, clock: whole(
            self, Capacity(slots=tuple(slots // 2 for slots in capacity.slots), pages=capacity.pages), clock
        ),
    )


def kept_groups_are_forgotten(patch):
    whole = pipeline.Pipeline.load_state_dict
    patch.setattr(pipeline.Pipeline, "load_state_dict", lambda self, state: (whole(self, state), self._kept.clear()))


def last_steps_are_forgotten(patch):
    whole = pipeline.Pipeline.state_dict
    patch.setattr(
        pipeline.Pipeline,
        "state_dict",
        lambda self: (state := whole(self)) | {"open": [opened | {"until": 99} for opened in state["open"]]},
    )


def pieces_are_forgotten(patch):
    whole = pipeline.Pipeline.load_state_dict
    patch.setattr(pipeline.Pipeline, "load_state_dict", lambda self, state: (whole(self, state), self._left.clear()))


def all_that_wait_are_forgotten(patch):
    patch.setattr(pipeline.Pipeline, "_admits", property(lambda self: len(self._open) < self._credit))


FAULTS = [
    all_that_wait_are_forgotten,
    pieces_are_forgotten,
    one_group_too_many,
    one_step_too_old,
    nobody_is_waited_for,
    all_are_waited_for,
    newest_first,
    half_the_slots,
    kept_groups_are_forgotten,
    last_steps_are_forgotten,
]


@pytest.mark.parametrize("fault", FAULTS)
def test_planted_faults_are_found(fault, monkeypatch):
    fault(monkeypatch)
    others = (BASE | {"steps": 20, "slots": 12, "size": 2}, BASE | {"filtered": True, "steps": 20}, SLOW | {"ready": 1})
    for case in (BASE, PIECES, *others):
        try:
            holds(case)
        except (AssertionError, AttributeError, KeyError, RuntimeError):
            return
    raise AssertionError("nobody objects")


@pytest.mark.parametrize("dispatch", [1, 5])
def test_bound_0_is_the_synchronous_ring(dispatch):
    """Also under drift: every answer is of the weights that it is trained at."""
    case = BASE | {"staleness": 0, "drift": 0.05, "dispatch": dispatch}
    judge, learner, _ = piped(case, 0)
    sync = turn(
        policy("sync", ToyPrompts(40, 3), steps=9, prompts=3), RacingEngine(drift=0.05, steps=dispatch), 9, grade(0.0)
    )
    assert judge.oldest == 0 and learner.batches == sync.batches and learner.params == sync.params


def test_frozen_weights_train_on_what_synchronous_rounds_do():
    """As a multiset: which step trains on a group is another."""
    case = BASE | {"drift": 0.0, "staleness": 4, "steps": 12}
    _, learner, engine = piped(case, 0)
    sync_engine = RacingEngine(slots=20, steps=2, order=5, replicas=2)
    sync = turn(policy("sync", ToyPrompts(40, 3), steps=12, prompts=3, replicas=2), sync_engine, 12, accuracy)
    assert trained(learner) == trained(sync)
    assert [names(groups) for groups in learner.parts] != [names(groups) for groups in sync.parts]
    assert engine.clock < 0.8 * sync_engine.clock  # what it is for


def test_filters_that_leave_nothing_say_so():
    scheduler = piping(ToyPrompts(9), prompts=2, group_size=3, max_staleness=1, filter_groups=True, max_waves=4)
    with pytest.raises(
        RuntimeError, match="filter_groups kept 0 of the 2 groups of step 1 after .*: it left out [89] groups"
    ):
        turn(scheduler, PipedEngine(slots=9), 3, lambda rollout: 1.0)


def test_a_bound_that_holds_back_is_counted():
    judge, _, engine = piped(BASE | {"staleness": 1, "slots": 40, "dispatch": 1, "order": None}, 0)
    told = judge.metrics()
    assert 0 < told["sched/paused_steps"] <= engine.clock
    assert told["sched/paused_steps"] <= told["sched/paused_slot_steps"] <= 80 * engine.clock
    free = piped(BASE | {"staleness": 5, "slots": 2, "ahead": 0}, 0)[0].metrics()
    assert free["sched/paused_steps"] == 0 == free["sched/num_groups_open"]


@pytest.mark.parametrize(
    "ratio, held, expected",
    [(0.0, 0.0, 1.42), (0.5, 0.0, 1.92), (0.5, 0.5, 2.42), (1.0, 0.0, 4.0), (3.0, 0.0, 4.0), (0.9, 3.0, 4.0)],
)
def test_expected_staleness(ratio, held, expected):
    """240 slots, batches of 240, answers of 100 tokens, the longest of a group 1.42 times as long: by hand."""
    assert pipeline.expected_staleness(
        rate=240 / 100, longest=142.0, batch=240, ratio=ratio, held=held, most=4
    ) == pytest.approx(expected)


def test_pauses_are_counted_by_the_slots_that_were_free():
    """Two groups of one answer may be open: of five slots three are free, for six steps; then one group has ended, and of its
    slot nothing may be made either: four free ones, for one step."""
    one = piping(ToyPrompts(9), prompts=2, group_size=1, max_staleness=0)
    first, _ = one.admit(Capacity(slots=(5,), pages=(99,)), 0)
    one.admit(Capacity(slots=(3,), pages=(99,)), 6)
    one.complete(made_groups.rollout(first.prompt, 0, [1]))
    one.admit(Capacity(slots=(4,), pages=(99,)), 6)
    one.admit(Capacity(slots=(4,), pages=(99,)), 7)
    found = one.metrics()
    assert (found["sched/paused_steps"], found["sched/paused_slot_steps"]) == (7.0, 6 * 3.0 + 4.0)


@pytest.mark.parametrize("ahead, admitted", [(0, 3), (2, 5), (4, 8)])
def test_so_many_answers_wait_for_a_slot(ahead, admitted):
    """Three slots and `ahead` more, up to the bound of four steps of two groups."""
    given = dict(prompts=2, group_size=1, max_staleness=3, ahead=ahead + (ahead == 4) * 9)
    one = piping(ToyPrompts(20), steps=9, **given)
    assert len(one.admit(Capacity(slots=(3,), pages=(99,)), 0)) == admitted
