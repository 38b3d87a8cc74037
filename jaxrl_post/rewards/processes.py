"""The processes of a pool: started, asked, heard, and replaced when one fails or takes too long.

Invariants:
- What a process writes is a reply to its present task, or it is refused. So a reward function that writes to the socket
  can neither end the trainer nor score another rollout.
- Every wait is bounded. A process that is killed has a fresh one in its place at once. So has one that was killed from
  outside while it started, as for memory.
- A task that fails is tried once more in a fresh process. Then it is given up. A task that no process took has not failed.
"""

from __future__ import annotations

import contextlib
import math
import multiprocessing.connection
import os
import secrets
import signal
import socket
import subprocess
import sys
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

from jaxrl_post.rewards import child
from jaxrl_post.rewards.printed import Failures, Printed
from jaxrl_post.rewards.sandbox import wire

START_LIMIT_S = 60.0
_KILLED_AT_START = 5  # times in a row until no further process is started
_NOT_TAKEN = 5  # times until a task counts as failed whose process was gone before it took the task
_LARGEST_REPLY = 1 << 20  # bytes
FAILED = {"failed": str, "place": str, "trace": str, "task": int}  # the last message of what raises


@dataclass(eq=False)
class Task:
    """What a process is asked.

    A subclass says what becomes of the reply.

    Attributes:
      function: what is run, as messages name it. `about`: on what.
      message: what the process gets.
      limit_s: seconds that it may take.
      counts: of its attempts: "retries" and "exceptions".
      not_taken: how often its process was gone before it took the task.
    """

    function: str
    about: str
    message: Mapping[str, Any]
    limit_s: float
    counts: dict[str, int]
    retried: bool = field(default=False, init=False)
    not_taken: int = field(default=0, init=False)

    def check(self, reply: Mapping) -> None:
        """Raises wire.Broken unless a reply of a known form fits the task."""

    def take(self, reply: Mapping) -> None:
        """Takes the reply."""

    def give_up(self, reason: str) -> None:
        """Takes the reason of the second failure."""


_Task = TypeVar("_Task", bound=Task)


class Process(Generic[_Task]):
    """One process with a socket to it.

    Attributes:
      task: what it works on. `queue`: what it works on next.
      limit_s, deadline: the seconds that the task may take, and when it must have replied.
      ready: whether it has loaded what it runs.

    `first`: what the process gets to load it. `printed` takes what the process and its children print. Without it their
    output is dropped, and errors go to the trainer's own.

    A subclass names the module whose `main` the process runs, and the forms of its messages.
    """

    main: str
    forms: Sequence[Mapping[str, type]]
    forms_at_start: Sequence[Mapping[str, type]]

    def __init__(self, first: Mapping[str, Any], printed: Printed | None = None):
        ours, theirs = socket.socketpair()
        # -c rather than a file: a file's folder would lead sys.path, and rewards/math.py would hide the stdlib's math
        code = (
            f"import sys; sys.path[:] = {sys.path!r}; from {self.main} import main; "
            f"main({theirs.fileno()}, {os.getpid()})"
        )
        env = os.environ | {"PYTHONHASHSEED": "0", "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
        with theirs, printed.opened() if printed else contextlib.nullcontext() as output:
            self.process = subprocess.Popen(
                [sys.executable, "-u", "-c", code],
                stdin=subprocess.DEVNULL,
                stdout=output or subprocess.DEVNULL,
                stderr=output,
                pass_fds=(theirs.fileno(),),
                env=env,
                start_new_session=True,
            )
        self.socket, self.buffer = ours, bytearray()
        self.task: _Task | None = None
        self.queue: deque[_Task] = deque()
        self.limit_s, self._nonce = START_LIMIT_S, 0
        self.ready = False
        self.deadline = time.monotonic() + START_LIMIT_S
        self.socket.settimeout(START_LIMIT_S)
        self.socket.sendall(child.pack(first))

    def fileno(self) -> int:
        return self.socket.fileno()

    def give(self, task: _Task) -> bool:
        """Sends a task. Returns False when the process is gone."""
        return self.send(task, task.message, task.limit_s)

    def send(self, task: _Task, message: Mapping[str, Any], limit_s: float) -> bool:
        """Sends a task as this message. Returns False when the process is gone. One that reads nothing is over its limit."""
        self.task, self.limit_s, self.deadline = task, limit_s, time.monotonic() + limit_s
        self._nonce = secrets.randbits(63)
        self.socket.settimeout(limit_s)
        try:
            self.socket.sendall(child.pack({"task": self._nonce, **message}))
        except TimeoutError:
            return True
        except OSError:
            return False
        return True

    def extend(self, seconds: float) -> None:
        """Gives the task `seconds` from now, if that is more than its limit."""
        if seconds > self.limit_s:
            self.limit_s, self.deadline = seconds, time.monotonic() + seconds

    def receive(self) -> Iterator[dict]:
        """Yields the messages that are complete after one read of the socket.

        Raises:
          EOFError: the process is gone.
          wire.Broken: what it wrote is no message of its present task.
        """
        try:
            data = self.socket.recv(1 << 16)
        except ConnectionError:
            data = b""
        if not data:
            raise EOFError
        self.buffer += data
        while (message := wire.unpack(self.buffer, _LARGEST_REPLY)) is not None:
            if not self.ready:
                _check(message, self.forms_at_start)
            elif self.task is None:
                raise wire.Broken("a message without a task")
            else:
                _check(message, self.forms)
                if message["task"] != self._nonce:
                    raise wire.Broken("a message of another task")
                self.task.check(message)
            yield message

    def end(self) -> int:
        """Kills the process and its children, reaps it, and returns its exit status."""
        self.socket.close()
        self.buffer.clear()
        with contextlib.suppress(ProcessLookupError, PermissionError):  # macOS raises the latter for a group of zombies
            os.killpg(self.process.pid, signal.SIGKILL)
        return self.process.wait()


def _check(message: Mapping, forms: Sequence[Mapping]) -> None:
    """Raises wire.Broken unless a message has one of the forms."""
    if not any(
        message.keys() == form.keys() and all(isinstance(message[name], kind) for name, kind in form.items())
        for form in forms
    ):
        raise wire.Broken("a message of no known form")


def check_numbers(numbers: Any) -> None:
    """Raises wire.Broken unless these are finite numbers by name."""
    if not isinstance(numbers, dict):
        raise wire.Broken("numbers that are no dict")
    for name, value in numbers.items():
        if type(value) is not float or not math.isfinite(value):
            raise wire.Broken(f"a number {name!r} that is not finite")


@dataclass(frozen=True)
class Failure:
    """Why a process must be replaced. `raised`: by an exception of what it runs, at `place`, with `trace`. No `reason`: it
    has ended by itself."""

    reason: str = ""
    place: str = ""
    trace: str = ""
    raised: bool = False


_Process = TypeVar("_Process", bound=Process)


class Processes(Generic[_Process]):
    """Processes of one kind, each of which works on one task at a time.

    Args:
      fresh: starts a process.
      count: how many there are.
      what: what they run, as errors name it.
      failures: shows what fails.

    `queue`: tasks for any process. `broken`: how many wrote something that is no reply. `restarts`: launchers of judged
    programs that had died.
    """

    def __init__(self, fresh: Callable[[], _Process], count: int, what: str, failures: Failures):
        self._fresh, self._what, self._failures, self._killed_at_start = fresh, what, failures, 0
        self.queue: deque[Task] = deque()
        self.broken = self.restarts = 0
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
        process, message = self._all[0], {}
        while not process.ready:
            if not multiprocessing.connection.wait([process], max(0.0, process.deadline - time.monotonic())):
                self.close()
                raise ValueError(f"{self._what}: not loaded after {START_LIMIT_S:g} s")
            try:
                message = next(process.receive(), {})
            except (EOFError, wire.Broken) as error:
                if isinstance(error, EOFError) and self._killed(process.end()):
                    process = self._all[0] = self._fresh()
                    continue
                message = {"refused": f"the process that loads {self._what} died"}
            if "refused" in message:
                self.close()
                raise ValueError(message["refused"])
            process.ready = "ready" in message
        return message

    def wait(self) -> None:
        """Takes a turn that lasts until the first process that works or loads must have replied."""
        self._feed()
        nearest = min(process.deadline for process in self._all if process.task or not process.ready)
        self.turn(max(0.0, nearest - time.monotonic()))

    def turn(self, wait_s: float = 0.0) -> None:
        """Hands out tasks, waits at most `wait_s`, takes replies, and kills processes that are over their limit."""
        self._feed()
        for process in multiprocessing.connection.wait(self._all, wait_s):
            try:
                for message in process.receive():
                    failure = _failure(process, message)
                    if failure is not None:
                        self._failed(process, failure)
                    elif "ready" in message:
                        process.ready = True
                    elif "budget" in message:
                        process.extend(message["budget"])
                    else:
                        task, process.task = process.task, None
                        self.restarts += message["restarts"]
                        task.take(message)
            except EOFError:
                self._failed(process, Failure())
            except wire.Broken as error:
                self.broken += 1
                self._failed(process, Failure(f"wrote {error} instead of a reply"))
        now = time.monotonic()
        for process in self:
            if now > process.deadline and (process.task or not process.ready):
                self._failed(process, _late(process.limit_s if process.ready else START_LIMIT_S))
        self._feed()

    def _feed(self) -> None:
        """Hands out tasks to processes that have none."""
        for process in self:
            tasks = process.queue or self.queue
            if process.ready and process.task is None and tasks and not process.give(task := tasks.popleft()):
                task.not_taken += 1
                if task.not_taken < _NOT_TAKEN:  # no attempt: it goes to the next process as it is
                    process.task = None
                    process.queue.appendleft(task)
                self._failed(process, Failure())

    def _failed(self, process: _Process, failure: Failure) -> None:
        """Replaces a process. Its task is tried once more in the fresh one, or given up after its second failure."""
        fresh, reason = self._replaced(process, failure)
        fresh.queue, task = process.queue, process.task
        if task is None:
            return
        task.counts["exceptions"] += failure.raised
        self._failures.tell(task.function, task.about, reason, failure.place, failure.trace)
        if task.retried:
            task.give_up(reason)
            return
        task.retried = True
        task.counts["retries"] += 1
        fresh.queue.appendleft(task)

    def _replaced(self, process: _Process, failure: Failure) -> tuple[_Process, str]:
        """Kills a process. Returns the fresh one in its place, and why it failed.

        Raises:
          RuntimeError: it had not loaded what it runs, so that a fresh one would fail too. One that was killed may be followed by
            a few others.
        """
        status = process.end()
        reason = failure.reason or f"the process ended with status {status}"
        position = self._all.index(process)
        if process.ready:
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


def _failure(process: Process, message: Mapping) -> Failure | None:
    """Returns the failure that a message tells of: a refusal, an exception, or a reply that came too late."""
    if "refused" in message:
        return Failure(message["refused"])
    if "failed" in message:
        return Failure(message["failed"], message["place"], message["trace"], raised=True)
    if message.get("seconds", 0.0) > process.limit_s:  # it was late, but its reply came before the deadline was checked
        return _late(process.limit_s, message["seconds"])
    return None


def _late(limit_s: float, seconds: float | None = None) -> Failure:
    took = "" if seconds is None else f"{seconds:.3g} s, "
    return Failure(f"took {took}longer than {limit_s:g} s")


def _end_all(processes: list) -> None:
    while processes:
        processes.pop().end()
