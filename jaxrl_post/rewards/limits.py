"""Limits of CPU seconds for judged programs, per prompt.

RollPacker (arXiv 2509.21009) bounds a test by the time of the slowest right program: T = min(max(2 s, 1.5 x that
time), 30 s).

Invariant: a limit depends only on the scores joined before, in the order of the ring. It is journaled with each score.
Because it depends on measured seconds, a run with adaptive limits is reproduced only from its journal.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

LOW_S, FACTOR = 2.0, 1.5


class Fixed:
    """The same limit for every prompt."""

    def __init__(self, seconds: float):
        self._seconds = seconds

    def of(self, prompt_id: str) -> float:
        """Returns the CPU seconds for each test of a rollout that is about to be judged."""
        return self._seconds

    def scored(self, record: Mapping) -> None:
        """Takes a journal record of a rollout: prompt_id, reward components, and cpu_s if its grader reported it."""


class Adaptive:
    """RollPacker's limit. Before the first right rollout of a prompt it is `most_s`.

    `records`: journal records of the run before it was resumed.
    """

    def __init__(self, most_s: float, records: Iterable[Mapping] = ()):
        self._most_s = most_s
        self._slowest: dict[str, float] = {}
        for record in records:
            self.scored(record)

    def of(self, prompt_id: str) -> float:
        slowest = self._slowest.get(prompt_id)
        return self._most_s if slowest is None else min(max(LOW_S, FACTOR * slowest), self._most_s)

    def scored(self, record: Mapping) -> None:
        if "cpu_s" in record and record["components"].get("acc") == 1:
            before = self._slowest.get(record["prompt_id"], 0.0)
            self._slowest[record["prompt_id"]] = max(before, record["cpu_s"])
