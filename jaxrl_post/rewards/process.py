"""A reward process, as the trainer sees it: its socket, its task and its deadline.

Invariant: what a process writes is a reply to its present task, or it is refused. So a reward function that writes to
the socket can neither end the trainer nor score another rollout.
"""

from __future__ import annotations

import contextlib
import math
import os
import secrets
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from jaxrl_post.rewards import worker as child
from jaxrl_post.rewards.printed import Printed
from jaxrl_post.rewards.sandbox import wire

START_LIMIT_S = 60.0
_LARGEST_REPLY = 1 << 20  # bytes


class WorkerProcess:
    """One reward process with a socket to it.

    Attributes:
      task: what it works on.
      limit_s, deadline: the seconds that the task may take, and when it must have replied.
      ready: whether the reward functions are loaded.

    `first`: what the process gets to load its functions. `printed` takes what the process and its children print. Without
    it their output is dropped, and errors go to the trainer's own.

    A subclass names the module whose `main` the process runs, and the forms of its messages.
    """

    main = "jaxrl_post.rewards.worker"
    forms: Sequence[Mapping[str, type]] = (
        {"numbers": list, "overrun": bool, "seconds": float, "restarts": int, "task": int},
        {"budget": float, "task": int},
        {"failed": str, "place": str, "trace": str, "task": int},
    )
    forms_at_start: Sequence[Mapping[str, type]] = ({"ready": list, "sandbox": dict}, {"refused": str})

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
        self.task: Any = None
        self.limit_s, self._nonce = START_LIMIT_S, 0
        self.ready = False
        self.deadline = time.monotonic() + START_LIMIT_S
        self.socket.settimeout(START_LIMIT_S)
        self.socket.sendall(child.pack(first))

    def fileno(self) -> int:
        return self.socket.fileno()

    def give(self, task: Any, limit_s: float) -> bool:
        """Sends a task, which has `function`, `arguments` and `members`. Returns False when the worker is gone."""
        return self.send(task, {"function": task.function, "arguments": task.arguments}, limit_s)

    def send(self, task: Any, message: Mapping[str, Any], limit_s: float) -> bool:
        """Sends a task as this message. Returns False when the worker is gone."""
        self.task, self.limit_s, self.deadline = task, limit_s, time.monotonic() + limit_s
        self._nonce = secrets.randbits(63)
        self.socket.settimeout(limit_s)
        try:
            self.socket.sendall(child.pack({"task": self._nonce, **message}))
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
          EOFError: the worker is gone.
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
                self._check_size(message)
            yield message

    def _check_size(self, message: Mapping) -> None:
        """Raises wire.Broken unless there are numbers for each rollout of the task."""
        numbers = message.get("numbers", self.task.members)
        if len(numbers) != len(self.task.members):
            raise wire.Broken("numbers of another count of rollouts")
        for one in message.get("numbers", ()):
            check_numbers(one)

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
