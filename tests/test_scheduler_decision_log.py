"""The recorder changes no decision and writes the same bytes for the same decisions."""

import json

from test_scheduler_rounds_rounds import accuracies, drive, make
from toy_ring import ToyPrompts

from jaxrl_post.scheduler.decision_log import Recorder
from jaxrl_post.scheduler.rounds.rounds import Sync


def recorded(order):
    lines = []
    scheduler = Recorder(make(ToyPrompts(11), Sync, steps=2), lines.append)
    return drive(scheduler, accuracies(1, 0.5, 0.1), order), lines


def test_decisions_are_unchanged_and_bytes_repeat():
    plain = drive(make(ToyPrompts(11), Sync, steps=2), accuracies(1, 0.5, 0.1), 3)
    result, lines = recorded(3)
    assert result == plain
    assert lines == recorded(3)[1]
    assert lines != recorded(4)[1]  # completions are events too


def test_every_event_is_there_with_its_clock():
    (batches, counts, admitted), lines = recorded(3)
    events = [json.loads(line) for line in lines]
    assert all(line.endswith("}\n") and line.count("\n") == 1 for line in lines)
    clocks = [event["clock"] for event in events]
    assert clocks == sorted(clocks) and clocks[-1] > 0

    def of(kind):
        return [event for event in events if event["event"] == kind]

    assert [tuple(id) for event in of("admit") for id, _ in event["requests"]] == admitted
    assert sorted(tuple(event["id"]) for event in of("complete")) == sorted(admitted)
    assert [[tuple(g) for g in event["groups"]] for event in of("take")] == batches
    assert len(of("scored")) == counts["sched/num_groups_admitted"] == sum(len(e["groups"]) for e in of("due"))
    assert all(len(event["rewards"]) == 3 for event in of("scored"))
