"""Seconds that a run's clocks stand for on devices of given prices: a timeline from the logs of its run folder.

The engine's dispatches follow one another. A learner with devices of its own begins when its batch is handed over, and
the engine goes on until it publishes. One that shares the engine's devices begins and ends at one clock. At a publish
the engine waits for the learner, and for the weights.

Invariant: all seconds are counts of the logs times prices. Nothing that was timed is read.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from cost_tables import Price


@dataclass(frozen=True, kw_only=True)
class Step:
    """One optimizer step.

    - dispatches: steps, rows of each dispatch between the publish before and this one.
    - begins: dispatches among them that ended before the learner began.
    - tokens: of the batch, prompts included.
    """

    dispatches: tuple[tuple[int, int], ...]
    begins: int
    tokens: int


@dataclass(frozen=True, kw_only=True)
class Seconds:
    """Of one optimizer step: from publish to publish, in dispatches, of the learner, and in which the engine waited."""

    all: float
    engine: float
    learner: float
    waited: float


def seconds(steps: Sequence[Step], price: Price, slots: int) -> list[Seconds]:
    """Returns the seconds of each step.

    Args:
      slots: of the engine, all replicas.
    """
    now, out = 0.0, []
    for step in steps:
        started = now
        begun = now if step.begins == 0 else None
        for count, (turns, rows) in enumerate(step.dispatches, 1):
            now += price.dispatch_s + slots * price.slot_s + turns * price.turn_s(rows)
            begun = now if count == step.begins else begun
        assert begun is not None, "a learner begins before its step ends"
        learner = price.train_step_s + step.tokens * price.train_token_s
        ready = max(now, begun + learner)
        engine, waited = now - started, ready - now
        now = ready + price.publish_s
        out.append(Seconds(all=now - started, engine=engine, learner=learner, waited=waited))
    return out


def steps_of(folder: Path) -> list[Step]:
    """Reads the steps of a run without evaluation.

    Raises:
      ValueError: the logs do not belong together, or dispatches drafted.
    """
    rows = [row for row in map(json.loads, (folder / "metrics.jsonl").read_text().splitlines()) if "actor/lr" in row]
    dispatches = [json.loads(line) for line in (folder / "dispatches.jsonl").read_text().splitlines()]
    begun = _begun(folder)
    if len(begun) != len(rows) or any(one.get("drafts") or one["purpose"] != "train" for one in dispatches):
        raise ValueError(
            f"{folder}: {len(rows)} rows of metrics, {len(begun)} steps begun; drafts and evaluation have no price"
        )
    out, at = [], 0
    for row, clock in zip(rows, begun, strict=True):
        mine = dispatches[at : at + int(row.get("rows/dispatches", 0))]
        turns = sum(one["steps"] for one in mine)
        if turns != int(row.get("rows/steps", 0)):
            raise ValueError(
                f"{folder}: step {row['step']} counts {row.get('rows/steps')} engine steps, its log {turns}"
            )
        at += len(mine)
        out.append(
            Step(
                dispatches=tuple((one["steps"], one["rows"]) for one in mine),
                begins=sum(one["clock"] < clock for one in mine),
                tokens=int(row["rollout/num_tokens"]),
            )
        )
    return out


def _begun(folder: Path) -> list[int]:
    """Returns the clock at which the learner got the first groups of each optimizer step."""
    clocks, open_clock = [], None
    for line in (folder / "scheduler_log.jsonl").read_text().splitlines():
        event = json.loads(line)
        if event["event"] != "take":
            continue
        open_clock = event["clock"] if open_clock is None else open_clock
        if event["commit"]:
            clocks.append(open_clock)
            open_clock = None
    return clocks
