"""The simulator fed a run's lengths takes the run's decisions: admits, finishes and takes, each at its clock, byte for
byte.

The real run is configs/demo.py, shortened, by the command. Its twin has the same loop, scheduler, evaluation and host
side of the engine, over a device of numpy (scripts/models/twin.py). The twin knows how long every rollout of the log
is, and nothing of when anything happened. Pages are plentiful in one case, and in another so few that rollouts are
preempted. There are two dispatch lengths. With configs/demo/tail_batching.py the scheduler parks rollouts and lets them
go on.

Then comes configs/demo/speculation.py. There the twin also knows how many tokens each step of a rollout accepted. It
knows what the drafts of each dispatch were worth, by which the engine chooses its row size. scheduler_log.jsonl must be
equal, and dispatches.jsonl, which holds clock, steps, row size and the use of its rows for every dispatch.

A planted difference shows that this is no tautology: the twin of a run in which one rollout is one token longer writes
another log.
"""

from __future__ import annotations

import json
import tempfile
from pathlib import Path

from twin_run import Run

MINUTES = 6.0
PLATFORM = "cpu"
SHORT = ("--config.steps=8", "--config.eval.prompts=24", "--config.eval.every=4", "--config.checkpoint.every=4")
FEW = "--config.engine.pages=140"  # for 64 slots, each of which wants two or three
DEMO, DRAFTING = "configs/demo.py", "configs/demo/speculation.py"
TAIL = "configs/demo/tail_batching.py"
AGAIN = ("--config.data.size=64", "--config.scheduler.prompts=32")  # an epoch is two steps, so there is a past
DEFERRING = tuple(f"--config.scheduler.{put}" for put in ("name=tail_batching", "over=1.25", "prefix_mode=recompute"))
ARMS = {
    "plentiful": (DEMO,),
    "scarce": (DEMO, FEW),
    "short_dispatches": (DEMO, "--config.engine.steps_per_dispatch=3"),
    "scarce_short_dispatches": (DEMO, FEW, "--config.engine.steps_per_dispatch=3"),
    "tail_verify": (TAIL,),
    "tail_recompute_scarce": (TAIL, "--config.scheduler.prefix_mode=recompute", FEW),
    "speculation": (DRAFTING, *AGAIN),
    "speculation_scarce": (DRAFTING, *AGAIN, "--config.engine.pages=120", "--config.engine.steps_per_dispatch=5"),
    "speculation_tail": (DRAFTING, *AGAIN, *DEFERRING),
    "speculation_clones": (DRAFTING, *AGAIN, "--config.speculation.clones=True", "--config.engine.row_sizes=(128,)"),
}


def show(record) -> None:
    with tempfile.TemporaryDirectory() as folder:
        for name, (file, *flags) in ARMS.items():
            place, flags = Path(folder) / name, (*SHORT, *flags)
            record.run("-m", "jaxrl_post.main", f"--config={file}", *flags, f"--run-dir={place}", timeout_s=900)
            _compare(record, name, Run(record.root / file, [f.removeprefix("--config.") for f in flags], place))


def _compare(record, name: str, run) -> None:
    decisions, dispatches = run.played()
    logged = {log: run.lines(log) for log in ("scheduler_log", "dispatches")}
    events = [json.loads(line)["event"] for line in logged["scheduler_log"]]
    for event in ("admit", "complete", "take", *["parked"] * ("tail" in name)):
        record.figure(f"{name}.{event}s", events.count(event), at_least=2)
    record.figure(f"{name}.dispatches", len(logged["dispatches"]), at_least=100)
    least = {"at_least": 20} if "scarce" in name else {"equals": 0}
    record.figure(f"{name}.preemptions", int(run.total("sched/preemptions")), **least)
    if "speculation" in name:
        record.figure(f"{name}.accepted_drafts", int(run.total("spec/num_accepted")), at_least=500)
        drafted = sum('"drafts":true' in line for line in logged["dispatches"])
        record.figure(f"{name}.dispatches_that_drafted", drafted, at_least=50)
    record.figure(f"{name}.decisions_that_differ", _differing(logged["scheduler_log"], decisions), equals=0)
    record.figure(f"{name}.dispatches_that_differ", _differing(logged["dispatches"], dispatches), equals=0)
    if name == "scarce":
        longer, _ = run.played(longer=True)
        record.figure(f"{name}.decisions_that_differ_with_one_token_more", _differing(decisions, longer), at_least=1)


def _differing(one: list[str], two: list[str]) -> int:
    return sum(a != b for a, b in zip(one, two)) + abs(len(one) - len(two))
