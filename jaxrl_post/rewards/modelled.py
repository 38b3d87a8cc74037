"""Scores of models beside, or in the place of, reward functions: a reward model's, and the verdicts of a judge.

A reward model is any function from texts of token ids to numbers, whose result for a text does not depend on the other
texts. A judge runs on the engine's devices. A question is a request of purpose "judge" to an engine of its own weights, and
its reply is greedy.

Invariants:
- A score is added to a record before the record is journaled. A record from before a resume has it already.
- A verdict is a function of the judge's weights and the question's tokens. When the question runs never changes it.
- Questions begin in the order in which they were asked. Equal open questions are asked once.
- A reply without a verdict leaves its rollout unscored, never scored 0. Greedy, it would be the same once more. One that is
  cut off at its longest has none: the number at its end may lack digits.
"""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import numpy as np

from jaxrl_post.rewards.question import Question
from jaxrl_post.ring.protocols import Engine
from jaxrl_post.ring.types import Finish, Request, Rollout, RolloutId

SCORE, VERDICT = "reward_model/score", "judge/verdict"  # components
BATCHES = 4  # of a judge's slots: a quarter of them begins together
_SHOWN = 200  # characters of a reply in the journal
_log = logging.getLogger(__name__)


class Beside:
    """What adds scores to the records of rollouts. Every process of a job calls it alike.

    A subclass says how a score is found. `name`: of its component. `key`: of a record that has been scored.

    Args:
      weight: of a score in the reward.
      alone: there are no reward functions, so that a record without them is scored.
    """

    name: str
    key: str

    def __init__(self, weight: float, alone: bool):
        self._weight, self._alone = weight, alone

    def start(self, rollout: Rollout) -> None:
        """Takes a rollout. One that is started again is scored again."""
        raise NotImplementedError

    def added(self, rollouts: Sequence[Rollout], records: Sequence[Mapping]) -> list[Mapping]:
        """Returns the records of started rollouts with their scores. Where a reward function failed, nothing is added."""
        raise NotImplementedError

    def metrics(self) -> dict[str, float]:
        """Returns counts since the last call."""
        return {}

    def _lacks(self, record: Mapping) -> bool:
        return self.key not in record and (record["scored"] or self._alone)

    def _with(self, record: Mapping, score: float | None, **told: Any) -> Mapping:
        """Returns a record with a score. None leaves its rollout unscored."""
        if score is None:
            counts = {**record["counts"], "unscored": 1}
            return {**record, self.key: None, **told, "scored": False, "counts": counts}
        reward, components = record["reward"] + self._weight * score, {**record["components"], self.name: score}
        return {**record, self.key: score, **told, "scored": True, "reward": reward, "components": components}


class Modelled(Beside):
    """Adds the scores of a reward model. `score`: maps texts, int32[T] each, to numbers. The other arguments: of Beside."""

    name, key = SCORE, "model"

    def __init__(self, score: Callable[[Sequence[np.ndarray]], np.ndarray], weight: float, *, alone: bool):
        super().__init__(weight, alone)
        self._score = score
        self._waiting: dict[RolloutId, np.ndarray] = {}
        self._found: dict[RolloutId, float] = {}

    def start(self, rollout: Rollout) -> None:
        """Takes a rollout, which is scored with others when the first of them is joined."""
        self._found.pop(rollout.id, None)
        self._waiting[rollout.id] = np.concatenate([rollout.prompt.tokens, rollout.tokens])

    def added(self, rollouts: Sequence[Rollout], records: Sequence[Mapping]) -> list[Mapping]:
        return [self._with_score(rollout, record) for rollout, record in zip(rollouts, records, strict=True)]

    def _with_score(self, rollout: Rollout, record: Mapping) -> Mapping:
        id = rollout.id
        if not self._lacks(record):
            self._waiting.pop(id, None)
            self._found.pop(id, None)
            return record
        if id not in self._waiting and id not in self._found:  # its journaled record served a group that changed since
            self.start(rollout)
        if id not in self._found:  # all rollouts that wait are scored together
            scores = self._score(list(self._waiting.values()))
            self._found.update(zip(self._waiting, map(float, scores), strict=True))
            self._waiting.clear()
        score = self._found.pop(id)
        return self._with(record, score if np.isfinite(score) else None)


class Judged(Beside):
    """Adds the verdicts of a judge.

    Args:
      queue: has the questions of every pool.
      request: makes the question about a rollout, or gives None where it is too long.
      text: of a reply.
      question: reads the verdict.
      weight, alone: of Beside.
    """

    name, key = VERDICT, "verdict"

    def __init__(
        self,
        queue: JudgeQueue,
        request: Callable[[Rollout], Request | None],
        text: Callable[[Rollout], str],
        question: Question,
        weight: float,
        *,
        alone: bool,
    ):
        super().__init__(weight, alone)
        self.queue, self._request, self._text, self._question = queue, request, text, question
        self._asked: dict[RolloutId, RolloutId | None] = {}  # rollout -> its question; None: it is too long
        self._counts: Counter[str] = Counter()

    def start(self, rollout: Rollout) -> None:
        """Asks about a rollout."""
        self._forget(rollout.id)
        request = self._request(rollout)
        self._asked[rollout.id] = request and request.rollout_id
        if request:
            self.queue.ask(request)

    def added(self, rollouts: Sequence[Rollout], records: Sequence[Mapping]) -> list[Mapping]:
        pairs = list(zip(rollouts, records, strict=True))
        judged = [rollout for rollout, record in pairs if self._lacks(record)]
        for rollout in judged:
            if rollout.id not in self._asked:
                self.start(rollout)
        self.queue.answer([asked for rollout in judged if (asked := self._asked[rollout.id])])
        out = [self._with_verdict(rollout, record) for rollout, record in pairs]
        for record in out:
            self._counts["questions"] += "verdict" in record
            self._counts["reply_tokens"] += record.get("reply_tokens", 0)
        return out

    def metrics(self) -> dict[str, float]:
        """Returns counts since the last call: rollouts with a question, also one that is too long to ask, and tokens of the replies."""
        out = {f"judge/{name}": float(self._counts[name]) for name in ("questions", "reply_tokens")}
        self._counts.clear()
        return out

    def _with_verdict(self, rollout: Rollout, record: Mapping) -> Mapping:
        if not self._lacks(record):
            self._forget(rollout.id)
            return record
        asked = self._asked.pop(rollout.id)
        reply = self.queue.take(asked) if asked else None
        text = self._text(reply) if reply else ""
        whole = reply is not None and reply.finish is not Finish.LENGTH
        verdict, shown = self._question.verdict(text) if whole else None, text[-_SHOWN:]
        if verdict is None:
            _log.info("judge: no verdict on %s; its reply ends with %r", rollout.id, shown)
        return self._with(record, verdict, reply=shown, reply_tokens=len(reply) if reply else 0)

    def _forget(self, id: RolloutId) -> None:
        """Takes the question about a rollout back, where one is open."""
        asked = self._asked.pop(id, None)
        if asked:
            self.queue.withdraw(asked)


class Weights(Protocol):
    """The judge's weights on the devices, where they are only there while questions run."""

    def wake(self) -> None:
        """Brings the weights to the devices, and makes room for keys and values."""

    def rest(self) -> None:
        """Frees both on the devices. No question is running."""


class JudgeQueue:
    """A protocols.Judge whose weights stay on the devices: open questions, and replies that nobody has taken yet.

    A dispatch costs nearly the same for few questions as for many, so questions begin in batches.

    Args:
      engine: of the judge's weights. Nobody else submits to it.
      most: questions that it runs at the same time.
      batch: so many begin together at least, where the ring does not wait for them.
    """

    def __init__(self, engine: Engine, most: int, batch: int):
        self._engine, self._most, self._batch = engine, most, batch
        self._wanted: Counter[RolloutId] = Counter()
        self._waiting: dict[RolloutId, Request] = {}
        self._running: set[RolloutId] = set()
        self._replies: dict[RolloutId, Rollout] = {}
        self._dispatches, self._spent_s = 0, 0.0

    def ask(self, request: Request) -> None:
        """Queues a question. One that is open or answered already is not asked again."""
        id = request.rollout_id
        self._wanted[id] += 1
        if id not in self._running and id not in self._replies:
            self._waiting.setdefault(id, request)

    def withdraw(self, id: RolloutId) -> None:
        """Takes a question back that was asked. It ends where nobody else asked it."""
        self._wanted[id] -= 1
        if self._wanted[id]:
            return
        del self._wanted[id]
        self._waiting.pop(id, None)
        self._replies.pop(id, None)
        if id in self._running:
            self._running.remove(id)
            self._engine.park([id])

    def work(self, slots: int) -> None:
        """Runs a dispatch where questions run; see protocols.Judge. A batch begins where it waits and its slots are free."""
        if min(slots - len(self._running), len(self._waiting)) >= self._batch:
            self._begin(slots)
        if slots and self._running:
            self._dispatch()

    def answer(self, ids: Sequence[RolloutId]) -> None:
        """Runs dispatches until these questions have replies."""
        while any(id not in self._replies for id in ids):
            self._begin(self._most)
            assert self._running, "a question is neither open nor answered"
            self._dispatch()

    def take(self, id: RolloutId) -> Rollout:
        """Returns the reply to a question, which is forgotten with the last of those who asked it."""
        reply = self._replies[id]
        self.withdraw(id)
        return reply

    def metrics(self) -> dict[str, float]:
        """Returns dispatches and seconds since the last call."""
        out = {"perf/judge_dispatches": float(self._dispatches), "timing_s/judge": self._spent_s}
        self._dispatches, self._spent_s = 0, 0.0
        return out

    def _begin(self, slots: int) -> None:
        """Submits the questions that were asked first, until as many run as there are slots."""
        free = min(slots, self._most) - len(self._running)
        begun = [self._waiting.pop(id) for id in list(self._waiting)[: max(free, 0)]]
        if begun:
            self._engine.submit(begun)
            self._running.update(request.rollout_id for request in begun)

    def _dispatch(self) -> None:
        begun = time.monotonic()
        for reply in self._engine.step():
            self._running.remove(reply.id)
            self._replies[reply.id] = reply
        self._dispatches += 1
        self._spent_s += time.monotonic() - begun


class SleepingJudgeQueue(JudgeQueue):
    """A protocols.Judge whose weights wait in host memory, and come to the devices for a batch of questions.

    It wakes where a batch waits and a slot is free. It then replies to all questions that wait, and sleeps.
    """

    def __init__(self, engine: Engine, most: int, batch: int, weights: Weights):
        super().__init__(engine, most, batch)
        self._weights = weights

    def work(self, slots: int) -> None:
        """Replies to all waiting questions where a batch waits and a slot is free; see protocols.Judge."""
        if slots and len(self._waiting) >= self._batch:
            self._answer_all()

    def answer(self, ids: Sequence[RolloutId]) -> None:
        """Replies to all waiting questions where one of these is open."""
        if any(id not in self._replies for id in ids):
            self._answer_all()

    def _answer_all(self) -> None:
        begun, spent_s = time.monotonic(), self._spent_s
        self._weights.wake()
        super().answer(list(self._waiting))
        self._weights.rest()
        self._spent_s = spent_s + time.monotonic() - begun  # with the way of the weights, which no dispatch counts
