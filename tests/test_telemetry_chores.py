"""Chores: in order, before what needs them, and under a dispatch; a run with them is the run without."""

import pytest

from jaxrl_post.telemetry.chores import Chores, PutOff


def test_calls_are_done_in_order_and_once():
    chores, done = Chores(), []
    chores.later(done.append, 1)
    chores.later(lambda: chores.later(done.append, 3))
    chores.later(done.append, 2)
    assert done == []
    chores.run()
    chores.run()
    assert done == [1, 2, 3]


def test_a_chore_that_fails_is_told_and_the_others_stay():
    chores, done = Chores(), []

    def fail():
        raise KeyError("grader")

    chores.later(fail)
    chores.later(done.append, 1)
    with pytest.raises(KeyError, match="grader"):
        chores.run()
    chores.run()
    assert done == [1]


class Part:
    step = 7

    def __init__(self):
        self.calls = []

    def start(self, *given):
        self.calls.append(("start", *given))

    def join(self, *given):
        self.calls.append(("join", *given))
        return len(self.calls)

    def metrics(self):
        return len(self.calls)


def test_a_part_is_called_later_and_before_what_needs_it():
    chores, part = Chores(), Part()
    put_off = PutOff(part, chores, later=("start",), after=("join",))
    other = Part()
    PutOff(other, chores, later=("start",), after=()).start("x")
    assert put_off.start(1) is None and put_off.start(2, 3) is None and put_off.step == 7
    assert part.calls == [] and put_off.metrics() == 0
    assert put_off.join("group") == 3
    assert part.calls == [("start", 1), ("start", 2, 3), ("join", "group")] and other.calls == [("start", "x")]
