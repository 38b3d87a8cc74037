"""How many CPU seconds a judged program may take, per prompt.

RollPacker (arXiv 2509.21009) cuts a test off soon after the slowest program that was right: T = min(max(2 s, 1.5 x
that), 30 s). Invariant: a limit follows from scores in the order in which the ring took them in, and is journaled with each; as
it hangs on measured seconds, a run with it repeats itself from its journal only.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Protocol

LOW_S, FACTOR = 2.0, 1.5


class Limits(Protocol):
    def of(self, prompt_id: str) -> float:
        """CPU seconds of a test of an answer that is about to be judged."""

    def scored(self, record: Mapping) -> None:
        """A journal's record of an answer: with prompt_id and reward components, and cpu_s where its grader told them."""


class Fixed:
    """The same for all."""

    def __init__(self, seconds: float):
        self._seconds = seconds

    def of(self, prompt_id: str) -> float:
        return self._seconds

    def scored(self, record: Mapping) -> None:
        pass


class Adaptive:
    """RollPacker's; before the first right answer to a prompt `most_s`. `records`: of the run's earlier life."""

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
