"""A judge beside a simulated engine: on the same devices, or on devices of its own.

Questions are asked and joined by the queue of a real run (rewards/modelled.py). Invariant: seconds are those of the two
simulated engines. A question is as long as the response and `question` tokens more, which are prefilled. Replies have
lengths of a log-normal distribution.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Protocol

import numpy as np

from jaxrl_post.rewards.modelled import JudgeQueue
from jaxrl_post.ring.types import Group, Prompt, Request, Rollout, RolloutId, Sampling, frozen
from jaxrl_post.simulate.engine import SimEngine
from jaxrl_post.simulate.learner import SimRewards
from jaxrl_post.simulate.length_distributions import LogNormal

SIGMA = 0.5  # of the logarithm of a reply's length


def replies(mean: float) -> LogNormal:
    """Returns the distribution of the lengths of replies with this mean."""
    return LogNormal(math.log(mean) - SIGMA**2 / 2, SIGMA)


class Timed(Protocol):
    """A protocols.Engine with seconds."""

    clock: int
    seconds: float


class Beside(JudgeQueue):
    """A judge on the devices of the policy: for each step of the policy it makes at most one, where a slot is free.

    `seconds`: of both engines, one after the other.
    """

    def __init__(self, judge: SimEngine, most: int, batch: int, policy: Timed):
        super().__init__(judge, most, batch)
        self._judge, self._policy, self._until = judge, policy, 0

    @property
    def seconds(self) -> float:
        return self._policy.seconds + self._judge.seconds

    def work(self, slots: int) -> None:
        """Makes as many steps as the policy made since the last call."""
        steps, self._until = self._policy.clock - self._until, self._policy.clock
        while steps > 0 and slots:
            before = self._judge.clock
            super().work(slots)
            if self._judge.clock == before:
                return
            steps -= self._judge.clock - before


class Apart(JudgeQueue):
    """A judge on devices of its own, which works while the policy generates.

    `seconds`: of the policy, and those that it waited for the last verdicts of a group.
    """

    def __init__(self, judge: SimEngine, most: int, batch: int, policy: Timed):
        super().__init__(judge, most, batch)
        self._judge, self._policy = judge, policy
        self._idle_s = self._waited_s = 0.0  # of the judge without questions; of the policy

    @property
    def seconds(self) -> float:
        return self._policy.seconds + self._waited_s

    def work(self, slots: int) -> None:
        """Makes the steps that fit into the policy's time so far."""
        while self._judge.seconds + self._idle_s < self.seconds:
            self._begin(self._most)
            if not self._running:
                self._idle_s = self.seconds - self._judge.seconds
                return
            self._dispatch()

    def answer(self, ids: Sequence[RolloutId]) -> None:
        """Replies to these questions. The policy waits meanwhile."""
        super().answer(ids)
        self._waited_s += max(self._judge.seconds + self._idle_s - self.seconds, 0.0)


class JudgedRewards:
    """A protocols.Rewards whose scores are those of other rewards, once the judge has answered.

    Args:
      question: tokens of a question beside the response. `cap`: the longest reply. `longest`: the longest response.
      replicas: of the judge.
    """

    def __init__(self, inner: SimRewards, queue: JudgeQueue, *, question: int, cap: int, longest: int, replicas: int):
        self._inner, self.queue, self._question, self._cap, self._replicas = inner, queue, question, cap, replicas
        self._blank = frozen(np.zeros(question + longest, np.int32))
        self._count = 0

    def start(self, rollout: Rollout) -> None:
        id = _asked(rollout.id)
        self.queue.ask(
            Request(
                rollout_id=id,
                prompt=Prompt(id="/".join(map(str, id)), tokens=self._blank[: self._question + len(rollout)]),
                seed=id.seed(),
                max_tokens=self._cap,
                sampling=Sampling(),
                replica=self._count % self._replicas,
            )
        )
        self._count += 1
        self._inner.start(rollout)

    def join(self, group: Group) -> Group:
        ids = [_asked(rollout.id) for rollout in group.rollouts]
        self.queue.answer(ids)
        for id in ids:
            self.queue.take(id)
        return self._inner.join(group)

    def metrics(self) -> dict[str, float]:
        return self._inner.metrics()


def _asked(id: RolloutId) -> RolloutId:
    return id._replace(purpose="judge")
