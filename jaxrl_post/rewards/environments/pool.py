"""Environments in killable processes. ask(...) hands a turn over, take(key) waits for what follows it.

Invariants:
- What follows a turn depends on the row and the messages alone, never on the number of workers.
- An environment fails if it raises, dies, or takes longer than its limit. The conversation is played again once in a fresh
  process. Then the failure is the reply.
- Every wait is bounded: START_LIMIT_S for a starting process, and `timeout_s` for each turn that it must play.
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

from jaxrl_post.rewards.environments.asking import Asking
from jaxrl_post.rewards.environments.worker import digest
from jaxrl_post.rewards.printed import Failures, Printed
from jaxrl_post.rewards.processes import FAILED, Process, Processes, Task, check_numbers

_BEGINNING = {"messages": list, "seconds": float, "restarts": int, "task": int}  # of a row's conversation


@dataclass(eq=False, kw_only=True)
class Turn(Task):
    """One turn to be answered, or without `said` the beginning of a row's conversation. `limit_s`: of one step."""

    key: str
    turns: int = 1
    reply: Mapping[str, Any] | None = None

    def check(self, reply: Mapping) -> None:
        """Raises wire.Broken unless numbers and reward are finite."""
        check_numbers(reply.get("numbers", {}) | {"reward": reply.get("reward", 0.0)})

    def take(self, reply: Mapping) -> None:
        self.reply = {name: value for name, value in reply.items() if name not in ("task", "restarts")}
        if reply["restarts"]:
            self.counts["sandbox_restarts"] = reply["restarts"]

    def give_up(self, reason: str) -> None:
        self.reply = {"failed": reason}


class EnvironmentProcess(Process[Turn]):
    """A process that plays conversations (worker.py). `kept`: conversations that it knows. `closed`: that have ended."""

    main = "jaxrl_post.rewards.environments.worker"
    forms = (_BEGINNING, {**_BEGINNING, "reward": float, "done": bool, "numbers": dict}, FAILED)
    forms_at_start = ({"ready": list}, {"refused": str})

    def __init__(self, first: Mapping, printed: Printed | None):
        super().__init__(first, printed)
        self.kept: set[str] = set()
        self.closed: list[str] = []

    def give(self, task: Turn) -> bool:
        """Sends a task. A conversation that the process does not know is played from its beginning, and may take longer."""
        limit_s = task.limit_s * (1 if task.key in self.kept else task.turns)
        self.kept.add(task.key)
        closed, self.closed = self.closed, []
        return self.send(task, {**task.message, "closed": closed}, limit_s)


class EnvironmentPool(AbstractContextManager):
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
        self._turns: dict[str, Turn] = {}
        self._failures, what = Failures("environment"), f"environment {path!r}"
        self._workers = Processes(lambda: EnvironmentProcess(first, printed), workers, what, self._failures)
        self.tools: list[Mapping] = self._workers.loaded()["ready"]

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
        self._queue("", {"row": dict(row)}, 1)
        reply = self.take("")[0]
        if "failed" in reply:
            raise ValueError(f"environment {self._path!r}: reset fails: {reply['failed']}")
        return list(reply["messages"])

    def ask(self, asking: Asking) -> None:
        """Hands over what the policy said in every turn of a conversation. Returns at once."""
        known = [digest(one) for one in asking.seen]
        message = {"key": asking.key, "row": dict(asking.row), "said": list(asking.said), "known": known}
        self._queue(asking.key, message, len(asking.said))
        self._workers.turn()

    def _queue(self, key: str, message: Mapping[str, Any], turns: int) -> None:
        counts = {"retries": 0, "exceptions": 0}
        self._turns[key] = task = Turn(
            self._path, key or "a row", message, self._timeout_s, counts, key=key, turns=turns
        )
        self._home(key).queue.append(task)

    def _home(self, key: str) -> EnvironmentProcess:
        """Returns the process that plays a conversation."""
        return self._workers[zlib.crc32(key.encode()) % len(self._workers)]

    def answered(self, key: str) -> bool:
        """Returns whether `take` would not wait."""
        self._workers.turn()
        return self._turns[key].reply is not None

    def take(self, key: str) -> tuple[Mapping[str, Any], dict[str, int]]:
        """Waits for the reply to a task and returns it with the counts of its attempts.

        A reply is {messages, reward, done, numbers, seconds}, or {failed} after the second failure. The seconds are those of
        this step alone.

        Raises:
          RuntimeError: a fresh process can no longer be started.
        """
        while (reply := self._turns[key].reply) is None:
            self._workers.wait()
        return reply, self._turns.pop(key).counts

    def drop(self, key: str) -> None:
        """Forgets a conversation that has ended."""
        worker = self._home(key)
        if key in worker.kept:
            worker.kept.discard(key)
            worker.closed.append(key)
