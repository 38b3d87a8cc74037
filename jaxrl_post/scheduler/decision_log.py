"""A scheduler that logs every decision of the scheduler inside it to scheduler_log.jsonl.

Invariant: lines are a function of the decisions. Keys are sorted and no line holds the time of day. So two processes
that decide alike write equal bytes. The recorder decides nothing itself.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

from jaxrl_post.ring.protocols import Scheduler, Source
from jaxrl_post.ring.types import Capacity, Group, Layout, Part, Request, Rollout, Stop


class CountingScheduler(Scheduler, Source, Protocol):
    """A scheduler that counts what it does."""


class Recorder:
    """A protocols.Scheduler around `scheduler`. `write` gets whole lines.

    Each line carries the clock of its decision: that of the last `admit`, or of a rollout that finished later.
    """

    def __init__(self, scheduler: CountingScheduler, write: Callable[[str], object]):
        self._scheduler, self._write = scheduler, write
        self._clock = 0
        self._layout: Layout | None = None

    def __str__(self) -> str:
        return str(self._scheduler)

    def _line(self, event: str, fields: dict) -> None:
        """Writes one line."""
        record = {"event": event, "clock": self._clock} | fields
        self._write(json.dumps(record, sort_keys=True, separators=(",", ":")) + "\n")

    def admit(self, capacity: Capacity, clock: int) -> list[Request]:
        self._clock = max(self._clock, clock)
        requests = self._scheduler.admit(capacity, clock)
        if requests:
            self._line("admit", {"requests": [_told(request) for request in requests]})
        return requests

    def complete(self, rollout: Rollout) -> Stop:
        self._clock = max(self._clock, rollout.finish_clock)
        stop = self._scheduler.complete(rollout)
        self._line(
            "complete",
            {
                "id": list(rollout.id),
                "finish": rollout.finish.value,
                "tokens": len(rollout),
                "finish_clock": rollout.finish_clock,
                "cancel": [],  # a field of the log's format; no scheduler cancels
                "park": [list(id) for id in stop.park],
            },
        )
        return stop

    def parked(self, rollouts: Sequence[Rollout]) -> None:
        self._scheduler.parked(rollouts)
        if rollouts:
            self._line("parked", {"ids": [[list(rollout.id), len(rollout)] for rollout in rollouts]})

    def due(self) -> list[Group]:
        groups = self._scheduler.due()
        if groups:
            self._line("due", {"groups": [_name(group) for group in groups]})
        return groups

    def scored(self, group: Group) -> None:
        self._line(
            "scored",
            {
                "group": _name(group),
                "rewards": group.rewards.tolist(),
                "scored": group.scored.tolist(),
                "accuracies": group.accuracies.tolist(),
            },
        )
        self._scheduler.scored(group)

    def take(self) -> list[Part]:
        parts = self._scheduler.take()
        for part in parts:
            self._line(
                "take",
                {
                    "fresh": [_name(group) for group in part.fresh],
                    "groups": [_name(group) for group in part.groups],
                    "commit": part.commit,
                    "publish": part.publish,
                },
            )
        return parts

    def layout(self) -> Layout | None:
        layout = self._scheduler.layout()
        if layout not in (None, self._layout):
            self._layout = layout
            self._line("layout", {"layout": layout.numbers})
        return layout

    def held(self) -> Sequence[Rollout]:
        return self._scheduler.held()

    def state_dict(self) -> dict:
        return {"clock": self._clock, "layout": self._layout, "scheduler": self._scheduler.state_dict()}

    def load_state_dict(self, state: Mapping) -> None:
        self._clock = state["clock"]
        self._layout = Layout(*state["layout"]) if state["layout"] is not None else None
        self._scheduler.load_state_dict(state["scheduler"])

    def metrics(self) -> Mapping[str, float]:
        return self._scheduler.metrics()


def _told(request: Request) -> list:
    """Returns id and replica of a request, and for a prefix its mode and its length."""
    told = [list(request.rollout_id), request.replica]
    return told if request.prefix is None else [*told, request.prefix_mode, len(request.prefix)]


def _name(group: Group) -> list:
    """Returns epoch and prompt id of a group."""
    return [group.rollouts[0].id.epoch, group.prompt.id]
