"""Environments in killable processes. ask(...) hands a turn over, take(key) waits for what follows it.

Invariants:
- What follows a turn depends on the row and the messages alone, never on the number of workers.
- An environment fails if it raises, dies, or takes longer than its limit. The conversation is played again once in a fresh
  process. Then the failure is the reply.
- Every wait is bounded: START_LIMIT_S for a starting process, and `timeout_s` for each turn that it must play.
"""

from __future__ import annotations

import zlib
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from jaxrl_post.rewards.environments.asking import Asking
from jaxrl_post.rewards.environments.worker import digest
from jaxrl_post.rewards.failures import Failures
from jaxrl_post.rewards.printed import Printed
from jaxrl_post.rewards.process import WorkerProcess, check_numbers
from jaxrl_post.rewards.workers import Failure, Workers


@dataclass(eq=False)
class Task:
    """One turn to be answered, or without `said` the beginning of a row's conversation."""

    key: str
    message: Mapping[str, Any]
    turns: int
    retried: bool = False
    counts: dict[str, int] = field(default_factory=lambda: {"retries": 0, "exceptions": 0})
    reply: Mapping[str, Any] | None = None


class EnvironmentProcess(WorkerProcess):
    """A process that plays conversations (worker.py). `queue`: its tasks. `kept`: conversations that it knows."""

    main = "jaxrl_post.rewards.environments.worker"
    forms = (
        {
            "messages": list,
            "reward": float,
            "done": bool,
            "numbers": dict,
            "seconds": float,
            "restarts": int,
            "task": int,
        },
        {"messages": list, "seconds": float, "restarts": int, "task": int},
        {"failed": str, "place": str, "trace": str, "task": int},
    )
    forms_at_start = ({"ready": list}, {"refused": str})

    def __init__(self, first: Mapping, printed: Printed | None):
        super().__init__(first, printed)
        self.queue: deque[Task] = deque()
        self.kept: set[str] = set()
        self.closed: list[str] = []

    def _check_size(self, message: Mapping) -> None:
        """Raises wire.Broken unless numbers and reward are finite."""
        check_numbers(message.get("numbers", {}) | {"reward": message.get("reward", 0.0)})


class EnvironmentPool:
    """Processes that play conversations with one environment.

    Args:
      path: import path of the environment. `arguments`: what it is made with. `code`: it as text (rewards/carried.py).
      workers: processes. A conversation stays in one of them.
      timeout_s: wall-clock limit of one step, in seconds.
      printed: takes what environments print.

    `tools`: the JSON schemas that the environment names.

    Raises:
      ValueError: there is no such environment, or it cannot be loaded.
    """

    def __init__(
        self,
        path: str,
        arguments: Mapping[str, Any],
        *,
        workers: int,
        timeout_s: float,
        code: str = "",
        printed: Printed | None = None,
    ):
        first = {"path": path, "arguments": dict(arguments), "code": code}
        self._path, self._timeout_s = path, timeout_s
        self._tasks: dict[str, Task] = {}
        self._failures = Failures("environment")
        self._workers = Workers(lambda: EnvironmentProcess(first, printed), workers, f"environment {path!r}")
        self.tools: list[Mapping] = self._workers.loaded()["ready"]

    def __enter__(self) -> EnvironmentPool:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        """Kills the processes and reaps them."""
        self._workers.close()

    @property
    def failures(self) -> tuple[str, ...]:
        """Returns a sentence for each kind of failure so far."""
        return tuple(self._failures.told)

    def reset(self, row: Mapping) -> list[dict]:
        """Returns the messages that a row's conversation begins with.

        Raises:
          ValueError: the environment failed.
        """
        self._queue(Task(key="", message={"row": dict(row)}, turns=1))
        reply = self.take("")[0]
        if "failed" in reply:
            raise ValueError(f"environment {self._path!r}: reset fails: {reply['failed']}")
        return list(reply["messages"])

    def ask(self, asking: Asking) -> None:
        """Hands over what the policy said in every turn of a conversation. Returns at once."""
        known = [digest(one) for one in asking.seen]
        message = {"key": asking.key, "row": dict(asking.row), "said": list(asking.said), "known": known}
        self._queue(Task(key=asking.key, message=message, turns=len(asking.said)))
        self._turn(0.0)

    def _queue(self, task: Task) -> None:
        self._tasks[task.key] = task
        self._home(task.key).queue.append(task)

    def _home(self, key: str) -> EnvironmentProcess:
        """Returns the process that plays a conversation."""
        return self._workers[zlib.crc32(key.encode()) % len(self._workers)]

    def answered(self, key: str) -> bool:
        """Returns whether `take` would not wait."""
        self._turn(0.0)
        return self._tasks[key].reply is not None

    def take(self, key: str) -> tuple[Mapping[str, Any], dict[str, int]]:
        """Waits for the reply to a task and returns it with the counts of its attempts.

        A reply is {messages, reward, done, numbers, seconds}, or {failed} after the second failure. The seconds are those of
        this step alone.

        Raises:
          RuntimeError: a fresh process can no longer be started.
        """
        task = self._tasks[key]
        while task.reply is None:
            self._feed()
            self._turn(self._workers.until_overdue())
        del self._tasks[key]
        return task.reply, task.counts

    def drop(self, key: str) -> None:
        """Forgets a conversation that has ended."""
        worker = self._home(key)
        if key in worker.kept:
            worker.kept.discard(key)
            worker.closed.append(key)

    # ---- processes

    def _turn(self, wait_s: float) -> None:
        """Hands out tasks, waits at most `wait_s`, processes replies, and kills processes over their limit."""
        self._feed()
        self._workers.turn(wait_s, self._heard, self._failed)
        self._feed()

    def _feed(self) -> None:
        for worker in self._workers:
            if worker.ready and worker.task is None and worker.queue:
                task = worker.queue.popleft()
                known = task.key in worker.kept
                worker.kept.add(task.key)
                told, worker.closed = {"closed": worker.closed}, []
                limit_s = self._timeout_s * (1 if known else task.turns)
                if not worker.send(task, {**task.message, **told}, limit_s):
                    self._failed(worker, Failure())

    def _heard(self, worker: EnvironmentProcess, message: dict) -> None:
        if "ready" in message:
            worker.ready = True
        else:
            task, worker.task = worker.task, None
            task.reply = {name: value for name, value in message.items() if name not in ("task", "restarts")}
            if message["restarts"]:
                task.counts["sandbox_restarts"] = message["restarts"]

    def _failed(self, worker: EnvironmentProcess, failure: Failure) -> None:
        """Replaces the process. Its task is tried once more there, or fails after its second failure."""
        fresh, reason = self._workers.replaced(worker, failure)
        fresh.queue = worker.queue
        task = worker.task
        if task is None:
            return
        task.counts["exceptions"] += failure.raised
        self._failures.tell(self._path, task.key or "a row", reason, failure.place, failure.trace)
        if not task.retried:
            task.retried = True
            task.counts["retries"] += 1
            fresh.queue.appendleft(task)
            return
        task.reply = {"failed": reason}
