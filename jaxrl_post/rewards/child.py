"""The child side of a pool's process: it loads what it runs, then replies to one task after another.

Invariants:
- It communicates only over the socket it was given, one message at a time. Each reply names the task that it is of.
- An exception ends the process after one last message, so no broken state reaches the next task.
- It imports neither jax nor numpy, so that a fresh process starts in well under half a second.
"""

from __future__ import annotations

import base64
import ctypes
import difflib
import importlib
import importlib.util
import os
import pickle
import signal
import socket
import sys
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from jaxrl_post.rewards.sandbox import counts, wire

_LARGEST_FRAME = (1 << 32) - 1  # bytes; what the trainer sends is trusted
_TRACE = 8000  # characters of a traceback
# Frames of this process, not of the user.
_OWN = ("<string>", *(str(Path(__file__).with_name(name)) for name in ("child.py", "worker.py", "batched.py")))


class Refused(Exception):
    """What a process should run cannot be loaded; the text is one sentence."""


class Service:
    """What a process runs.

    Attributes:
      what: begins the sentence that it cannot be loaded.
      files: where it is written.
    """

    what: str
    files: Sequence[str]

    def load(self) -> Mapping[str, Any]:
        """Returns the first message to the trainer. Raises Refused."""
        raise NotImplementedError

    def answer(self, task: Mapping) -> Mapping[str, Any]:
        """Returns the reply to a task."""
        raise NotImplementedError

    def budget(self, task: Mapping) -> float | None:
        """Returns the seconds that a task may take, or None where the trainer's limit holds."""
        return None

    def place(self, task: Mapping) -> str:
        """Returns file and line of what a task asks for, or an empty text where it is not known."""
        return ""


def die_with(parent: int) -> None:
    """Makes the kernel kill this process when its parent dies, at any moment (Linux only)."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
    if os.getppid() != parent:
        raise SystemExit("the pool is gone")


def serve(fd: int, parent: int, made: Callable[[Mapping], Service]) -> None:
    """Serves the socket `fd` until the other end closes it. `made`: maps the trainer's first message to what is run."""
    die_with(parent)
    os.set_inheritable(fd, False)
    channel, buffer = socket.socket(fileno=fd), bytearray()
    service, task = made(_receive(channel, buffer)), None

    def last_word(kind, error, trace):
        place = service.place(task) if task else ""
        told = _described(error, trace, [place.rpartition(":")[0]] if place else service.files)
        if task is not None:
            channel.sendall(pack({"task": task["task"], **told, "place": told["place"] or place}))
            return
        at = f" at {told['place']}" if told["place"] else ""
        text = f"{service.what} cannot be loaded: {told['failed']}{at}"
        channel.sendall(pack({"refused": str(error) if kind is Refused else text}))

    sys.excepthook = last_word
    channel.sendall(pack(service.load()))
    while True:
        task = _receive(channel, buffer)
        if (seconds := service.budget(task)) is not None:
            channel.sendall(pack({"task": task["task"], "budget": seconds}))
        begun = time.monotonic()
        reply = service.answer(task)
        about = {"task": task["task"], "seconds": time.monotonic() - begun, "restarts": counts.pop("restarts", 0)}
        channel.sendall(pack(about | reply))


def found(path: str, code: str) -> Any:
    """Returns what an import path names, or what `code` holds as text (rewards/carried.py).

    Raises:
      Refused: no such module, file or name.
    """
    if code:
        return pickle.loads(base64.b64decode(code))
    module_name, colon, name = path.rpartition(":")
    if not colon or not module_name or not name:
        raise Refused(f"reward function {path!r} must be written pkg.mod:fn or file.py:fn")
    module = _module(path, module_name)
    if not hasattr(module, name):
        near = difflib.get_close_matches(name, [n for n in vars(module) if callable(getattr(module, n))], n=1)
        raise Refused(
            f"reward function {path!r}: {module_name} has no {name!r}" + (f"; nearest is {near[0]!r}" if near else "")
        )
    return getattr(module, name)


def _module(path: str, name: str):
    if name.endswith(".py"):
        file = Path(name)
        if not file.is_file():
            raise Refused(f"reward function {path!r}: there is no file {file.absolute()}")
        spec = importlib.util.spec_from_file_location(f"reward_{file.stem}", file)
        module = importlib.util.module_from_spec(spec)
        sys.modules[spec.name] = module
        spec.loader.exec_module(module)
        return module
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name is None or not (name + ".").startswith(error.name + "."):
            raise
        raise Refused(f"reward function {path!r}: there is no module {error.name!r}") from error


def pack(message: Mapping) -> bytes:
    """Returns a message as a frame.

    Raises:
      TypeError: a value is neither a JSON type, a number nor an array.
      wire.Broken: the frame is too large.
    """
    return wire.pack(message, _LARGEST_FRAME, _plain)


def _plain(value):
    """Converts numbers and arrays of other libraries to values that JSON has."""
    if isinstance(value, Mapping):
        return dict(value)
    for name in ("tolist", "item"):
        if hasattr(value, name):
            return getattr(value, name)()
    raise TypeError(f"a {type(value).__name__} in a prompt's columns cannot go to a reward function: {value!r}")


def _receive(channel: socket.socket, buffer: bytearray) -> dict:
    try:
        return wire.receive(channel, buffer, _LARGEST_FRAME)
    except EOFError:
        raise SystemExit(0) from None


def _described(error: BaseException, trace: Any, files: Sequence[str]) -> dict[str, str]:
    """Describes an exception: what it says, where in the user's code, and the traceback.

    The place is the last line in `files`, else the last line of all.
    """
    frames = [
        one for one in traceback.extract_tb(trace) if one.filename not in _OWN and "importlib" not in one.filename
    ]
    if isinstance(error, SyntaxError) and error.filename:
        place = f"{error.filename}:{error.lineno}"
    else:
        own = [one for one in frames if any(os.path.abspath(one.filename) == os.path.abspath(file) for file in files)]
        place = "".join(f"{one.filename}:{one.lineno}" for one in (own or frames)[-1:])
    said = "".join(traceback.format_exception_only(error)).strip()
    text = "".join(traceback.format_list(frames))
    return {"failed": f"{type(error).__name__}: {error}"[:2000], "place": place, "trace": f"{text}{said}"[-_TRACE:]}
