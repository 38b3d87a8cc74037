"""The trace: against times worked out by hand, and against what a reader of the format needs."""

from __future__ import annotations

import json

import numpy as np
import plain_rollouts
import pytest
from trace_reader import check, tracks

from jaxrl_post.ring.types import Finish, Prompt, Request, RolloutId, Sampling
from jaxrl_post.telemetry import trace


class Clock:
    now = 100.0

    def __call__(self):
        return self.now


class Text(list):
    def write(self, piece):
        self.append(piece)

    @property
    def events(self):
        return json.loads("".join(self))


PROMPT = Prompt(id="p", tokens=[1])


def asked(sample, **changed):
    id = RolloutId(0, "train", 0, "p", sample)
    return Request(rollout_id=id, prompt=PROMPT, seed=id.seed(), max_tokens=50, sampling=Sampling(), **changed)


def answer(sample, start, end, tokens=4, finish=Finish.EOS):
    id = RolloutId(0, "train", 0, "p", sample)
    return plain_rollouts.rollout(id, PROMPT, np.zeros(tokens), finish=finish, clock=(start, end))


def ring(rounds=9, slots=2):
    text, clock = Text(), Clock()
    return trace.RingTrace(text.write, clock, slots=slots, rounds=rounds), clock, text


def dispatch(ring, clock, before, after, seconds, finished=()):
    ring.stepping(before)
    clock.now += seconds
    ring.stepped(finished, after)


def test_a_step_inside_a_dispatch_has_its_share_of_the_time():
    """Two slots; dispatches of 10 steps from 0 to 1 s and, after a second of waiting, of 10 steps from 2 to 4 s."""
    told, clock, text = ring()
    told.launched([asked(0), asked(1), asked(2)], 0, 0)
    dispatch(told, clock, 0, 10, 1.0, [answer(0, 0, 5)])
    clock.now += 1.0
    dispatch(told, clock, 10, 20, 2.0, [answer(1, 0, 20), answer(2, 10, 15)])
    told.published(1)
    told.close()
    events = text.events
    check(events)
    found = tracks(events)
    assert found["replica 0", "slot 000"] == [("p #0", 0.0, 0.5), ("p #2", 2.0, 3.0)]
    assert found["replica 0", "slot 001"] == [("p #1", 0.0, 4.0)]
    assert found["replica 0", "running"] == [(2, 0.0), (1, 0.5), (2, 2.0), (1, 3.0), (0, 4.0)]
    assert found["ring", "engine"] == [("10 steps", 0.0, 1.0), ("10 steps", 2.0, 4.0)]
    assert found["ring", "round"] == [("round to version 1", 0.0, 4.0)] and found["ring", "version"] == [(1, 4.0)]
    assert found["ring", "requests in the engine"] == [(3, 0.0), (2, 1.0), (0, 4.0)]
    first = next(e for e in events if e["name"] == "p #0")
    assert first["args"] == {"epoch": 0, "attempt": 0, "again": False, "tokens": 4, "finish": "eos", "versions": [0]}


def test_who_comes_back_gets_a_slot_when_one_is_free():
    """Three parked answers come back at 0 s into two slots; the third waits for the first that ends."""
    told, clock, text = ring()
    told.launched([asked(s, prefix=answer(s, 0, 0, 2, Finish.PARKED)) for s in range(3)], 0, 0)
    dispatch(told, clock, 0, 10, 1.0, [answer(1, 0, 4)])
    dispatch(told, clock, 10, 20, 1.0, [answer(0, 0, 20)])
    told.stopped([answer(2, 0, 20, finish=Finish.PARKED)], 20, 0)
    told.close()
    check(text.events)
    found = tracks(text.events)
    assert found["replica 0", "slot 000"] == [("p #0", 0.0, 2.0)]
    assert found["replica 0", "slot 001"] == [("p #1", 0.0, 0.4), ("p #2", 0.4, 2.0)]
    assert next(e for e in text.events if e["name"] == "p #2")["args"]["finish"] == "parked"


def test_near_spans_of_a_phase_are_one():
    told, _, text = ring()
    for name, begun, ended in [
        ("reward", 100.0, 100.0001),
        ("reward", 100.0002, 100.0003),
        ("reward", 100.5, 100.6),
        ("old_log_prob", 101, 102),
        ("update_actor", 102, 103),
        ("gen", 103, 104),
        ("reward", 105, 105),
    ]:
        told.phase(name, begun, ended)
    told.close()
    found = tracks(text.events)
    assert found["ring", "reward"] == [("reward", 0.0, 0.0003), ("reward", 0.5, 0.6)]
    assert (
        found["ring", "learner"] == [("old_log_prob", 1, 2), ("update_actor", 2, 3)] and ("ring", "engine") not in found
    )


def test_so_many_rounds_and_no_more():
    told, clock, text = ring(rounds=2)
    for version in (1, 2, 3):
        told.launched([asked(0)], 0, 0)
        dispatch(told, clock, version - 1, version, 1.0, [answer(0, version - 1, version)])
        told.phase("update_actor", clock.now - 0.5, clock.now)
        told.published(version)
        told.close() if version == 3 else None
    assert told.closed and len(tracks(text.events)["ring", "round"]) == 2
    assert len(tracks(text.events)["replica 0", "slot 000"]) == 2


def test_a_write_that_fails_closes_the_trace():
    pieces = []

    def write(text):
        if len(pieces) == 1:
            raise OSError(28, "No space left on device")
        pieces.append(text)

    told = trace.RingTrace(write, lambda: 0.0, slots=1, rounds=1)
    with pytest.raises(OSError, match="No space left"):
        told.launched([asked(0)], 0, 0)
    told.close()
    assert told.closed and len(pieces) == 1


def test_nothing_happened_is_a_file_too():
    told, _, text = ring()
    told.close()
    assert text.events == []
    with pytest.raises(AssertionError, match="closed"):
        trace.TraceFile(text.write).close() or told._file.counter("a", "b", 0, 0)


def test_whole_random_rounds_are_drawn_step_by_step():
    """A queue in front of 4 slots that are filled between dispatches of 3 steps of a second each: every answer has one
    span, from the dispatch that seated it to its last step, and the counter holds what a count over the spans gives."""
    told, clock, text = ring(slots=4)
    noise, steps, seen = np.random.default_rng(0), 0, {}
    for version in range(1, 4):
        queue, seated = [(17 * version + sample, int(noise.integers(1, 12))) for sample in range(17)], {}
        told.launched([asked(sample) for sample, _ in queue], steps, version - 1)
        while queue or seated:
            while queue and len(seated) < 4:
                sample, length = queue.pop(0)
                seated[sample] = steps, steps + length
            done = {sample: (a, b) for sample, (a, b) in seated.items() if b <= steps + 3}
            dispatch(told, clock, steps, steps + 3, 3.0, [answer(sample, a, b) for sample, (a, b) in done.items()])
            seated = {sample: life for sample, life in seated.items() if sample not in done}
            seen.update({f"p #{sample}": life for sample, life in done.items()})
            steps += 3
        told.published(version)
    told.close()
    check(text.events)
    found = tracks(text.events)
    drawn = {name: (a, b) for (_, thread), spans in found.items() if thread.startswith("slot") for name, a, b in spans}
    assert drawn == seen and sum(name.startswith("slot") for _, name in found) == 4
    for value, at in found["replica 0", "running"]:
        assert value == sum(a <= at < b for a, b in seen.values())
