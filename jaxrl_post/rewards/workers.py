"""The processes of a pool: started, heard, and replaced when one fails or takes too long.

Invariant: every wait is bounded. A process that is killed has a fresh one in its place at once, also one that was killed
from outside while it started, as for memory.
"""

from __future__ import annotations

import multiprocessing.connection
import signal
import time
import weakref
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Generic, TypeVar

from jaxrl_post.rewards.process import START_LIMIT_S, WorkerProcess
from jaxrl_post.rewards.sandbox.wire import Broken

_KILLED_AT_START = 5  # times in a row until no further process is started

_Process = TypeVar("_Process", bound=WorkerProcess)


@dataclass(frozen=True)
class Failure:
    """Why a process must be replaced. `raised`: by an exception of what it runs, at `place`, with `trace`. No `reason`: it
    has ended by itself."""

    reason: str = ""
    place: str = ""
    trace: str = ""
    raised: bool = False


class Workers(Generic[_Process]):
    """Processes of one kind, each of which works on one task at a time.

    Args:
      fresh: starts a process.
      count: how many there are.
      what: what they run, as errors name it.

    `broken`: how many wrote something that is no reply.
    """

    def __init__(self, fresh: Callable[[], _Process], count: int, what: str):
        self._fresh, self._what, self.broken, self._killed_at_start = fresh, what, 0, 0
        self._all: list[_Process] = []
        self._finalizer = weakref.finalize(self, _end_all, self._all)  # runs at exit too
        self._all += [fresh() for _ in range(count)]

    def __iter__(self) -> Iterator[_Process]:
        return iter(list(self._all))

    def __len__(self) -> int:
        return len(self._all)

    def __getitem__(self, at: int) -> _Process:
        return self._all[at]

    def close(self) -> None:
        """Kills the processes and reaps them."""
        _end_all(self._all)

    def loaded(self) -> Mapping:
        """Waits until the first process has loaded what it runs. Returns its message.

        Raises:
          ValueError: it cannot be loaded, or is not after START_LIMIT_S.
        """
        worker, message = self._all[0], {}
        while not worker.ready:
            if not multiprocessing.connection.wait([worker], max(0.0, worker.deadline - time.monotonic())):
                self.close()
                raise ValueError(f"{self._what}: not loaded after {START_LIMIT_S:g} s")
            try:
                message = next(worker.receive(), {})
            except (EOFError, Broken) as error:
                if isinstance(error, EOFError) and self._killed(worker.end()):
                    worker = self._all[0] = self._fresh()
                    continue
                message = {"refused": f"the process that loads {self._what} died"}
            if "refused" in message:
                self.close()
                raise ValueError(message["refused"])
            worker.ready = "ready" in message
        return message

    def until_overdue(self) -> float:
        """Returns the seconds until the first process that works or loads must have replied."""
        nearest = min(worker.deadline for worker in self._all if worker.task or not worker.ready)
        return max(0.0, nearest - time.monotonic())

    def turn(
        self, wait_s: float, heard: Callable[[_Process, dict], None], failed: Callable[[_Process, Failure], None]
    ) -> None:
        """Waits at most `wait_s`. Hands over messages, and processes that failed or are over their limit.

        Args:
          heard: gets a message that tells of no failure.
          failed: gets a failure, and must replace the process.
        """
        for worker in multiprocessing.connection.wait(self._all, wait_s):
            try:
                for message in worker.receive():
                    failure = _failure(worker, message)
                    if failure is None:
                        heard(worker, message)
                    else:
                        failed(worker, failure)
            except EOFError:
                failed(worker, Failure())
            except Broken as error:
                self.broken += 1
                failed(worker, Failure(f"wrote {error} instead of a reply"))
        now = time.monotonic()
        for worker in self:
            if now > worker.deadline and (worker.task or not worker.ready):
                failed(worker, _late(worker.limit_s if worker.ready else START_LIMIT_S))

    def replaced(self, worker: _Process, failure: Failure) -> tuple[_Process, str]:
        """Kills a process. Returns the fresh one in its place, and why it failed.

        Raises:
          RuntimeError: it had not loaded what it runs, so that a fresh one would fail too. One that was killed may be followed by
            a few others.
        """
        status = worker.end()
        reason = failure.reason or f"the process ended with status {status}"
        position = self._all.index(worker)
        if worker.ready:
            self._killed_at_start = 0
        elif failure.reason or not self._killed(status):
            self.close()
            raise RuntimeError(f"a fresh process for {self._what} cannot be started: {reason}")
        self._all[position] = fresh = self._fresh()
        return fresh, reason

    def _killed(self, status: int) -> bool:
        """Counts a process that ended while it started. Returns whether it was killed and another may be started."""
        self._killed_at_start += 1
        return status == -signal.SIGKILL and self._killed_at_start < _KILLED_AT_START


def _failure(worker: WorkerProcess, message: Mapping) -> Failure | None:
    """Returns the failure that a message tells of: a refusal, an exception, or a reply that came too late."""
    if "refused" in message:
        return Failure(message["refused"])
    if "failed" in message:
        return Failure(message["failed"], message["place"], message["trace"], raised=True)
    if message.get("seconds", 0.0) > worker.limit_s:  # it was late, but its reply came before the deadline was checked
        return _late(worker.limit_s, message["seconds"])
    return None


def _late(limit_s: float, seconds: float | None = None) -> Failure:
    took = "" if seconds is None else f"{seconds:.3g} s, "
    return Failure(f"took {took}longer than {limit_s:g} s")


def _end_all(workers: list) -> None:
    while workers:
        workers.pop().end()
