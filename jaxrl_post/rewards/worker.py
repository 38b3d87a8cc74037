"""The child side of the reward pool: loads the reward functions, then scores one task after another.

Invariants:
- It communicates only over the socket it was given, one message at a time.
- An exception of a reward function ends the process after one last message, so no broken state reaches the next
  rollout.
- It imports neither jax nor numpy, so that a fresh process starts in well under half a second.
"""

from __future__ import annotations

import base64
import ctypes
import difflib
import importlib
import importlib.util
import inspect
import os
import pickle
import signal
import socket
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from jaxrl_post.rewards import Overrun
from jaxrl_post.rewards.sandbox import Unavailable, wire

_LARGEST_FRAME = (1 << 32) - 1  # bytes; what the trainer sends is trusted
_LARGEST = 3.4e38  # rewards are float32
_NAMES = ("data_source", "solution_str", "ground_truth", "extra_info")
_LISTS = ("prompts", "completions", "completion_ids", "rollout")  # arguments of every call
TRUTHS = ("ground_truth", "answer", "solution")  # names of TRL's columns that hold a ground truth
_BY_NAME = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)


class Refused(Exception):
    """The path of a reward function is wrong; its text is one sentence."""


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


class Loaded(NamedTuple):
    """A reward function.

    Attributes:
      signature: "verl" or "trl".
      needs: columns that a prompt must have.
      truths: columns that must hold a ground truth. "" stands for the prompt's own.
      instead: columns of which one may stand for the prompt's own ground truth.
      score: maps the pool's arguments to numbers. The dict is empty where the function does not apply.
      budget: maps the pool's arguments to seconds that `score` may take, where that is more than the pool's limit.
        Without it the pool's limit holds.
      sandboxed: whether the function judges programs in a sandbox.
    """

    signature: str
    needs: tuple[str, ...]
    truths: tuple[str, ...]
    score: Callable[[Any], dict[str, float]]
    budget: Callable[[Any], float] | None = None
    sandboxed: bool = False
    instead: tuple[str, ...] = ()


def load(path: str, code: str = "") -> Loaded:
    """Returns the reward function of `pkg.mod:fn` or `file.py:fn`, with either signature.

    `code`: the function itself as text (rewards/carried.py); `path` then only names it.

    A function with an argument `completions` has TRL's signature. Any other has verl's. Its arguments are passed by
    name, in any order, if it has verl's names, else by position. Attributes of a function:

    - `needs_truth`, a bool: whether every prompt must have a ground truth. Without it, functions of verl's signature need
      one, and functions of TRL's need the columns of TRUTHS that they name without a default.
    - `instead_of_truth`, names of columns: a prompt with one of them needs no ground truth.
    - `prepare`, a function without arguments: it is called once, when the function is loaded.

    Raises:
      Refused: no such module, file or function, not callable, or neither signature fits.
    """
    name = path.rpartition(":")[2]
    function = pickle.loads(base64.b64decode(code)) if code else _found(path)
    if not callable(function):
        raise Refused(f"reward function {path!r}: {name!r} is a {type(function).__name__}, not a function")
    if inspect.iscoroutinefunction(function):
        raise Refused(
            f"reward function {path!r}: {name!r} is async; write a plain function, which has a process of "
            "its own to wait in"
        )
    getattr(function, "prepare", lambda: None)()
    signature = inspect.signature(function)
    if "completions" in signature.parameters:
        return _batched(path, name, function, signature)
    truths = ("",) if _needs_truth(path, function, True) else ()
    given = getattr(function, "budget", None)
    budget = None if given is None else (lambda values: float(given(*values)))
    sandboxed = bool(getattr(function, "sandboxed", False))
    instead = tuple(getattr(function, "instead_of_truth", ()))
    if _binds(signature, (), dict.fromkeys(_NAMES)):
        named = lambda values: verdict(function(**dict(zip(_NAMES, values, strict=True))))  # noqa: E731
        return Loaded("verl", (), truths, named, budget, sandboxed, instead)
    if _binds(signature, _NAMES, {}):
        return Loaded("verl", (), truths, lambda values: verdict(function(*values)), budget, sandboxed, instead)
    raise Refused(
        f"reward function {path!r}: {name}{signature} does not take the four arguments {', '.join(_NAMES)}, "
        "nor TRL's (prompts, completions, completion_ids, **columns)"
    )


def _needs_truth(path: str, function: Callable, otherwise: bool | None) -> bool | None:
    """Returns a function's attribute `needs_truth`, or `otherwise` where it has none."""
    needs = getattr(function, "needs_truth", otherwise)
    if needs is not otherwise and not isinstance(needs, bool):
        raise Refused(f"reward function {path!r}: its attribute needs_truth must be True or False, got {needs!r}")
    return needs


def _batched(path: str, name: str, function: Callable, signature: inspect.Signature) -> Loaded:
    """Returns a function of TRL's signature. Arguments are passed by name, with one entry per completion.

    The function gets only the arguments that it names, unless it has **kwargs.
    """
    kinds = {parameter.kind for parameter in signature.parameters.values()}
    if inspect.Parameter.POSITIONAL_ONLY in kinds:
        raise Refused(f"reward function {path!r}: {name}{signature} must take its arguments by name")
    named = {key: parameter for key, parameter in signature.parameters.items() if parameter.kind in _BY_NAME}
    needs = tuple(
        key for key, parameter in named.items() if parameter.default is inspect.Parameter.empty and key not in _LISTS
    )
    needed = _needs_truth(path, function, None)
    truths = () if needed is False else tuple(name for name in needs if name in TRUTHS) or (("",) if needed else ())
    any_name = inspect.Parameter.VAR_KEYWORD in kinds

    def score(given: dict) -> dict[str, float]:
        returned = function(**{key: value for key, value in given.items() if any_name or key in named})
        return _only(returned, len(given["completions"]))

    return Loaded("trl", needs, truths, score)


def _only(returned: object, count: int) -> dict[str, float]:
    """Returns the number of a batch of one, or an empty dict for None."""
    values = returned.tolist() if hasattr(returned, "tolist") else returned
    if not isinstance(values, (list, tuple)) or len(values) != count:
        raise ValueError(
            f"it must return a list of one number or None per completion, {count} of them; got {str(values)[:80]!r}"
        )
    return {} if values[0] is None else verdict(values[0])


def _found(path: str) -> Any:
    """Returns what an import path names."""
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


def _binds(signature: inspect.Signature, positional, named) -> bool:
    try:
        signature.bind(*positional, **named)
    except TypeError:
        return False
    return True


def verdict(returned: object) -> dict[str, float]:
    """Returns the numbers in a reward function's result: "score", "acc" where given, and every other finite number.

    Raises:
      ValueError: no score, or a score or acc that is no finite number.
    """
    given = returned if isinstance(returned, Mapping) else {"score": returned}
    if "score" not in given:
        raise ValueError(f"the dict has no 'score', only {sorted(map(str, given))}")
    numbers = {str(name): number for name, value in given.items() if (number := _number(value)) is not None}
    for name in ("score", "acc"):
        if name in given and name not in numbers:
            raise ValueError(f"{name} is {given[name]!r}, which is no finite number")
    return numbers


def _number(value: object) -> float | None:
    if hasattr(value, "item") and getattr(value, "size", 1) == 1:
        value = value.item()
    if not isinstance(value, (int, float)):
        return None
    return float(value) if abs(value) <= _LARGEST else None  # False for NaN too


def _die_with(parent: int) -> None:
    """Makes the kernel kill this process when its parent dies, at any moment (Linux only)."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
    if os.getppid() != parent:
        raise SystemExit("the pool is gone")


def _receive(channel: socket.socket, buffer: bytearray) -> dict:
    try:
        return wire.receive(channel, buffer, _LARGEST_FRAME)
    except EOFError:
        raise SystemExit(0) from None


def _confined(functions: list[Loaded], level: str) -> dict:
    """Returns the level and layers of the sandbox, empty if no function judges programs.

    Raises:
      Refused: the host does not give the level.
    """
    if not any(one.sandboxed for one in functions):
        return {}
    from jaxrl_post.rewards import code

    try:
        sandbox = code.sandbox_at(level)
    except Unavailable as error:
        raise Refused(str(error)) from None
    return {"level": sandbox.level, "layers": sandbox.layers}


def main(fd: int, parent: int) -> None:
    """Serves the socket `fd` until the other end closes it. Each reply names the task that it is of."""
    _die_with(parent)
    os.set_inheritable(fd, False)
    channel, buffer = socket.socket(fileno=fd), bytearray()
    first = _receive(channel, buffer)
    paths, task = first["functions"], None

    def last_word(kind, error, trace):
        text = f"{kind.__name__}: {error}"[:2000]
        if task is None:
            known = kind is Refused
            channel.sendall(
                pack({"refused": str(error) if known else f"a reward function of {paths} cannot be loaded: {text}"})
            )
        else:
            channel.sendall(pack({"task": task["task"], "failed": text}))

    sys.excepthook = last_word
    functions = [load(path, first["code"].get(path, "")) for path in paths]
    sandbox = _confined(functions, first["sandbox"])
    ready = [[one.signature, one.needs, one.truths, one.instead] for one in functions]
    channel.sendall(pack({"ready": ready, "sandbox": sandbox}))
    while True:
        task = _receive(channel, buffer)
        function, about = functions[task["function"]], {"task": task["task"]}
        if function.budget is not None:
            channel.sendall(pack(about | {"budget": function.budget(task["arguments"])}))
        begun = time.monotonic()
        try:
            numbers, overrun = function.score(task["arguments"]), False
        except Overrun as error:
            numbers, overrun = verdict(error.args[0] if error.args else 0.0), True
        channel.sendall(pack(about | {"numbers": numbers, "overrun": overrun, "seconds": time.monotonic() - begun}))
