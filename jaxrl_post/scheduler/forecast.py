"""What a round would take: answers of known lengths replayed on one replica, by a cost given beforehand.

Invariant: seconds are computed from lengths and a cost table, so every process of a job forecasts the same. A forecast
advances all running answers by one token a step; it knows of no drafts and no shared prompts.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import numpy as np


class Cost(Protocol):
    """Seconds of an engine step, as cost.DecodeCost and cost.TableCost give them."""

    prefill_s: float

    def __call__(self, rows: np.ndarray, context: np.ndarray) -> np.ndarray:
        """Of a step with so many rows and tokens of KV behind them, elementwise."""


@dataclass(frozen=True, kw_only=True)
class Replica:
    """One replica of a layout: its slots, the tokens of KV that it holds, and what its steps cost."""

    slots: int
    kv_tokens: int
    cost: Cost


class Forecast(NamedTuple):
    """Seconds until the last answer, how often one was parked for want of KV, and the most tokens of KV that the answers
    which had a slot would have needed at once, as a share of what there is."""

    seconds: float
    preemptions: int
    pressure: float


class _Run:
    """Of one replay: answers by order of their start. `ends`: a heap of (progress at which it finishes, order)."""

    def __init__(self, replica: Replica, work: Sequence[tuple[int, int]]):
        self.replica, self.waiting = replica, deque((prompt, length, 0) for prompt, length in work)
        self.running: dict[
            int, tuple[int, int, float]
        ] = {}  # order -> prompt, length, progress at which it had no token
        self.ends: list[tuple[float, int]] = []
        self.order = 0
        self.progress = self.context = self.seconds = 0.0
        self.preemptions, self.most = 0, 0.0

    def seat(self) -> None:
        """The first that wait take slots, while there is KV for what they come with and a token of each."""
        while self.waiting and len(self.running) < self.replica.slots:
            prompt, length, done = self.waiting[0]
            if self.running and self.context + prompt + done + len(self.running) >= self.replica.kv_tokens:
                return
            self.waiting.popleft()
            self.running[self.order] = prompt, length, self.progress - done
            heapq.heappush(self.ends, (self.progress - done + length, self.order))
            self.order += 1
            self.context += prompt + done
            self.seconds += self.replica.cost.prefill_s * (prompt + done)

    def park(self) -> None:
        """While there is no KV for a token of each, the youngest waits."""
        while len(self.running) > 1 and self.context + len(self.running) > self.replica.kv_tokens:
            prompt, length, begun = self.running.pop(max(self.running))
            self.context -= prompt + self.progress - begun
            self.waiting.appendleft((prompt, length, self.progress - begun))
            self.preemptions += 1

    def advance(self) -> None:
        """Until somebody finishes or the KV is full."""
        while self.ends[0][1] not in self.running:
            heapq.heappop(self.ends)
        rows = len(self.running)
        room = (self.replica.kv_tokens - self.context) // rows if rows > 1 else np.inf
        steps = min(self.ends[0][0] - self.progress, room)
        step = self.replica.cost(np.array([rows]), np.array([self.context + rows * steps / 2]))
        self.seconds += float(step[0]) * steps
        self.progress += steps
        self.context += rows * steps
        self.most = max(self.most, self.context)

    def finish(self) -> None:
        """Those that have all their tokens leave."""
        while self.ends and (self.ends[0][1] not in self.running or self.ends[0][0] <= self.progress):
            prompt, length, _ = self.running.pop(heapq.heappop(self.ends)[1], (0, 0, 0.0))
            self.context -= prompt + length


def replay(replica: Replica, work: Sequence[tuple[int, int]]) -> Forecast:
    """Answers (prompt tokens, answer tokens) of one replica, started in this order."""
    run = _Run(replica, work)
    while run.waiting or run.running:
        run.seat()
        run.park()
        run.advance()
        run.finish()
    return Forecast(run.seconds, run.preemptions, run.most / replica.kv_tokens)


def share(work: Sequence[tuple[int, int]], replicas: int) -> list[tuple[int, int]]:
    """What the busiest of so many replicas gets when equal loads are dealt: of the answers by length every `replicas`-th,
    the longest first, in their own order."""
    longest = sorted(range(len(work)), key=lambda i: (-work[i][1], i))[::replicas]
    return [work[i] for i in sorted(longest)]


def pipelined(times: np.ndarray, train_s: float, lag: int = 1) -> np.ndarray:
    """When each step's training ends, float64[K], if a replica begins its part of step k as soon as it is through with k - 1
    and the weights of step k - 1 - `lag` are there. lag 0: rounds with a barrier.

    Args:
      times: [K, W] seconds that replica w works on step k.
    """
    steps, replicas = times.shape
    free, trained = np.zeros(replicas), np.zeros(steps)
    for k in range(steps):
        ready = trained[k - 1 - lag] if k > lag else 0.0
        free = np.maximum(free, ready) + times[k]
        trained[k] = max(free.max(), trained[k - 1] if k else 0.0) + train_s
    return trained
