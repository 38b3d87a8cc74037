"""The ring's events and deferred calls; what the loop tells, in order; a run's seconds by phase."""

from __future__ import annotations

import plain_rollouts
import pytest
from toy_ring import ToyEngine, ToyLearner, ToyPrompts, ToyRewards, publish, scheduler_of

from jaxrl_post.ring import loop
from jaxrl_post.ring.events import EVENTS, Ring, TimedRing
from jaxrl_post.ring.history import History
from jaxrl_post.ring.timing import Stopwatch
from jaxrl_post.ring.types import Finish, Stop
from jaxrl_post.scheduler.rounds.rounds import Sync


class Clock:
    now = 0.0

    def __call__(self):
        return self.now

    def work(self, seconds):
        self.now += seconds
        return seconds


def timed():
    clock = Clock()
    return TimedRing(watch := Stopwatch(clock, lambda: 0.0)), clock, watch


def test_listeners_are_told_in_the_order_of_their_registration():
    ring, lines = Ring(), []
    ring.on("published", lambda version: lines.append(("first", version)))
    ring.on("published", lambda version: lines.append(("second", version)), lambda version: lines.append("third"))
    ring.tell("published", 3)
    ring.tell("committed", {}, None)
    assert lines == [("first", 3), ("second", 3), "third"]
    with pytest.raises(KeyError, match="publised"):
        ring.on("publised", print)


def test_deferred_calls_are_made_in_order_and_once():
    ring, _, _ = timed()
    done = []
    ring.later("reward", done.append, 1)
    ring.later("log", lambda: ring.later("log", done.append, 3))
    ring.later("reward", done.append, 2)
    assert done == []
    ring.flush()
    ring.flush()
    assert done == [1, 2, 3]
    plain, at_once = Ring(), []
    plain.later("reward", at_once.append, 1)
    assert at_once == [1] and plain.call("gen", lambda: 7) == 7


def test_a_deferred_call_that_fails_is_not_repeated_and_the_others_stay():
    ring, _, _ = timed()
    done = []

    def fail():
        raise KeyError("grader")

    ring.later("reward", fail)
    ring.later("reward", done.append, 1)
    with pytest.raises(KeyError, match="grader"):
        ring.flush()
    ring.flush()
    assert done == [1]


def test_deferred_calls_within_a_phase_count_as_overlapped():
    ring, clock, watch = timed()
    ring.later("reward", clock.work, 2.0)
    ring.call("gen", lambda: (clock.work(1.0), ring.flush()))
    ring.later("reward", clock.work, 4.0)
    ring.flush()
    assert watch.drain() == {
        "timing_s/gen": 3.0,
        "timing_s/overlapped": 2.0,
        "timing_s/reward": 4.0,
        "timing_s/step": 7.0,
        "perf/host_cores_busy": 0.0,
    }


class Diary(Ring):
    """Writes down everything that the loop tells and calls."""

    def __init__(self):
        super().__init__()
        self.lines = []
        for event in EVENTS:
            self.on(event, lambda *what, event=event: self.lines.append((event, *map(self._short, what))))

    @staticmethod
    def _short(what):
        return len(what) if isinstance(what, (list, tuple, dict)) else what if isinstance(what, int) else "-"

    def call(self, phase, function, *arguments):
        self.lines.append((phase, function.__name__))
        return super().call(phase, function, *arguments)

    def later(self, phase, function, *arguments):
        self.lines.append(("later", phase, function.__name__))
        return function(*arguments)

    def flush(self):
        self.lines.append("flush")


def sync(kind=Sync, prompts=2, max_tokens=1):
    """A scheduler of one step, with groups of two."""
    given = dict(run_seed=0, steps=1, max_tokens=max_tokens, prompts=prompts, group_size=2, max_waves=1)
    return scheduler_of(kind, ToyPrompts(5), **given)


def test_what_the_loop_tells_and_calls():
    """One round of two prompts, two samples each, one token each: every line in its place."""
    ring = Diary()
    loop.run(ring, ToyEngine(), sync(), ToyRewards(lambda r: 1.0), ToyLearner(), publish, 1)
    assert ring.lines == [
        ("gen", "submit"),
        ("launched", 4, 0, 0),
        ("stepping", 0),
        ("gen", "step"),
        ("stepped", 4, 1),
        *[("later", "reward", "start")] * 4,
        *["flush", ("reward", "join"), ("scored", "-")] * 2,
        ("preparing", 2),
        ("later", "old_log_prob", "prepare"),
        ("accumulating", 2),
        ("later", "update_actor", "accumulate"),
        "flush",
        ("update_actor", "commit"),
        ("committed", 1, "-"),
        ("published", 1),
    ]


def parked(request):
    return plain_rollouts.rollout(request.rollout_id, request.prompt, [], finish=Finish.PARKED, clock=(0, 1))


def test_stopped_rollouts_are_told_before_the_scheduler_has_them_and_nobodys_are_not_told():
    class Parking(ToyEngine):
        def submit(self, requests):
            self.asked = {request.rollout_id: request for request in requests} or self.asked
            super().submit(requests)

        def park(self, ids):
            return [parked(self.asked[id]) for id in ids]

    class Stopping(Sync):
        def complete(self, rollout):
            super().complete(rollout)
            return Stop(park=(rollout.id,) if rollout.id.sample else ())

        def parked(self, rollouts):
            order.append(("parked", len(rollouts)))

    order, ring = [], Ring()
    ring.on("stopped", lambda rollouts, clock, version: order.append(("stopped", len(rollouts), clock, version)))
    scheduler = sync(Stopping, prompts=1)
    loop.run(ring, Parking(), scheduler, ToyRewards(lambda r: 1.0), ToyLearner(), publish, 1)
    assert sorted(order) == [("parked", 0), ("parked", 1), ("stopped", 1, 1, 0)]
    assert order.index(("stopped", 1, 1, 0)) == order.index(("parked", 1)) - 1


def test_a_group_is_recorded_before_the_scheduler_has_it():
    class Watching(Sync):
        def scored(self, group):
            known.append(len(history.of(group.prompt.id)))
            super().scored(group)

    known, history, ring = [], History(epochs=1, max_bytes=1 << 20), Ring()
    ring.on("scored", history.record)
    scheduler = sync(Watching, prompts=3, max_tokens=4)
    loop.run(ring, ToyEngine(), scheduler, ToyRewards(lambda r: 1.0), ToyLearner(), publish, 1)
    assert known == [1, 1, 1] and len(history) == 3
