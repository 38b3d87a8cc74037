"""Predicts how long a round takes: rollouts of known lengths are replayed on one replica with a given step cost.

Invariant: seconds follow from lengths and a cost table, so every process of a job predicts the same. A forecast
advances all running rollouts by one token a step. It ignores speculation and shared prompts.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import numpy as np


class Cost(Protocol):
    """Seconds of an engine step, for example a `step_cost.DecodeCost` or `step_cost.TableCost`. `prefill_s`: seconds
    per prefilled token.
    """

    prefill_s: float

    def __call__(self, rows: np.ndarray, context: np.ndarray) -> np.ndarray:
        """Returns seconds of a step, elementwise.

        Args:
          rows: rollouts in the step.
          context: tokens of KV cache that they read in total.
        """


@dataclass(frozen=True, kw_only=True)
class ReplicaCapacity:
    """One replica of a layout."""

    slots: int  # rollouts that run at the same time
    kv_tokens: int  # tokens of KV cache that fit
    cost: Cost  # seconds of its steps


class Forecast(NamedTuple):
    """What a replay found."""

    seconds: float  # until the last rollout finished
    preemptions: int  # for lack of KV cache
    pressure: float  # largest KV demand of running rollouts, as a share of the capacity


class _Run:
    """The state of one replay. Rollouts are numbered by the order in which they start.

    Attributes:
      waiting: prompt tokens, rollout tokens, and tokens already generated of each waiting rollout.
      running: start order -> prompt tokens, rollout tokens, and the progress at which it had no token.
      ends: a heap of (progress at which a rollout finishes, its start order).
    """

    def __init__(self, replica: ReplicaCapacity, work: Sequence[tuple[int, int]]):
        self.replica = replica
        self.waiting: deque[tuple[int, int, float]] = deque((prompt, length, 0) for prompt, length in work)
        self.running: dict[int, tuple[int, int, float]] = {}
        self.ends: list[tuple[float, int]] = []
        self.order = 0
        self.progress = self.context = self.seconds = 0.0
        self.preemptions, self.most = 0, 0.0

    def seat(self) -> None:
        """Gives slots to the first waiting rollouts. It stops when the KV cache lacks space for a rollout's tokens plus
        one token of each running one.
        """
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
        """Preempts the youngest rollouts until the KV cache has space for one more token of each running one."""
        while len(self.running) > 1 and self.context + len(self.running) > self.replica.kv_tokens:
            prompt, length, begun = self.running.pop(max(self.running))
            self.context -= prompt + self.progress - begun
            self.waiting.appendleft((prompt, length, self.progress - begun))
            self.preemptions += 1

    def advance(self) -> None:
        """Advances until a rollout finishes or the KV cache is full."""
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
        """Removes rollouts that have all their tokens."""
        while self.ends and (self.ends[0][1] not in self.running or self.ends[0][0] <= self.progress):
            prompt, length, _ = self.running.pop(heapq.heappop(self.ends)[1], (0, 0, 0.0))
            self.context -= prompt + length


def replay(replica: ReplicaCapacity, work: Sequence[tuple[int, int]]) -> Forecast:
    """Replays rollouts on one replica.

    Args:
      replica: slots, KV capacity and step cost.
      work: (prompt tokens, rollout tokens) of each rollout, in the order in which they start.
    """
    run = _Run(replica, work)
    while run.waiting or run.running:
        run.seat()
        run.park()
        run.advance()
        run.finish()
    return Forecast(run.seconds, run.preemptions, run.most / replica.kv_tokens)


def share(work: Sequence[tuple[int, int]], replicas: int) -> list[tuple[int, int]]:
    """Returns the work of the busiest replica when rollouts are dealt evenly.

    The busiest replica gets every `replicas`-th rollout by length, beginning with the longest. The result keeps the
    given order.
    """
    longest = sorted(range(len(work)), key=lambda i: (-work[i][1], i))[::replicas]
    return [work[i] for i in sorted(longest)]
