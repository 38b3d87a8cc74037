"""A watched engine against the engine itself, and what its watchers hear."""

from __future__ import annotations

import numpy as np
from toy_ring import SAMPLING, ToyEngine, ToyPrompts

from jaxrl_post.telemetry.watched import Heard, Watched
from jaxrl_post.types import Finish, Request, Rollout, RolloutId


class Diary:
    def __init__(self):
        self.lines = []

    def launched(self, requests, clock, version):
        self.lines.append(("launched", len(requests), clock, version))

    def stepping(self, clock):
        self.lines.append(("stepping", clock))

    def stepped(self, finished, clock):
        self.lines.append(("stepped", len(finished), clock))

    def stopped(self, rollouts, clock, version, cancelled):
        self.lines.append(("stopped", [r.id.sample for r in rollouts], clock, version, cancelled))


class Parking(ToyEngine):
    """A toy engine whose unfinished answers can be taken out."""

    def park(self, ids):
        ids = set(ids)
        mine = [live for live in self._live if live[0].rollout_id in ids]
        self._live = [live for live in self._live if live not in mine]
        return [
            Rollout(
                id=r.rollout_id,
                prompt=r.prompt,
                tokens=[],
                sampled=[],
                logprobs=[],
                entropies=[],
                versions=[],
                drafted=[],
                finish=Finish.PARKED,
                start_clock=0,
                finish_clock=self.clock,
            )
            for r, _ in mine
        ]


def requests(count):
    epoch, prompt = ToyPrompts(3).at(0)
    ids = [RolloutId(0, "train", epoch, prompt.id, sample) for sample in range(count)]
    return [Request(rollout_id=id, prompt=prompt, seed=id.seed(), max_tokens=9, sampling=SAMPLING) for id in ids]


def test_it_answers_as_the_engine_inside():
    diary, asked = Diary(), requests(6)
    plain, watched = Parking(slots=3, order=1), Watched(Parking(slots=3, order=1), [diary])
    told = []
    for engine in (plain, watched):
        engine.submit(asked)
        out = [[r.id for r in engine.step()], engine.capacity, engine.pending]
        engine.cancel([asked[4].rollout_id, asked[5].rollout_id])
        out += [[r.id for r in engine.park([asked[3].rollout_id])], engine.pending]
        while engine.pending:
            out.append([(r.id, r.tokens.tolist()) for r in engine.step()])
        engine.submit([])
        engine.swap(None, 1)
        told.append([*out, engine.clock, engine.version])
    assert told[0] == told[1]
    gone = [line for line in diary.lines if line[0] == "stopped"]  # the fifth answer ended in the first step
    assert diary.lines[0] == ("launched", 6, 0, 0) and diary.lines[1] == ("stepping", 0)
    assert gone == [("stopped", [5], 1, 0, True), ("stopped", [3], 1, 0, False)]
    assert sum(line[1] for line in diary.lines if line[0] == "stepped") == 6 - 2
    assert [line for line in diary.lines if line[0] == "launched"] == diary.lines[:1]  # nothing is no news


def test_what_nobody_has_stopped_is_not_told():
    diary = Diary()
    watched = Watched(Parking(slots=3), [diary])
    watched.cancel([requests(1)[0].rollout_id])
    assert watched.park([]) == [] and diary.lines == []


def test_listeners_hear_before_it_happens():
    class Part:
        size = 3

        def add(self, a, b):
            lines.append("added")
            return a + b

    lines = []
    heard = Heard(Part(), {"add": [lambda a, b: lines.append((a, b)), lambda a, b: lines.append(np.sign(a))]})
    assert heard.add(2, 5) == 7 and heard.size == 3 and lines == [(2, 5), 1, "added"]
