"""The child side of the reward pool: loads the reward functions, then scores one task after another.

Invariants:
- It communicates only over the socket it was given, one message at a time.
- An exception of a reward function ends the process after one last message, so no broken state reaches the next
  rollout.
- It imports neither jax nor numpy, so that a fresh process starts in well under half a second.
"""

from __future__ import annotations

import base64
import difflib
import importlib
import importlib.util
import inspect
import os
import pickle
import socket
import sys
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from jaxrl_post.rewards import Overrun, batched
from jaxrl_post.rewards.batched import verdict
from jaxrl_post.rewards.lifetime import die_with
from jaxrl_post.rewards.sandbox import Unavailable, counts, wire

_LARGEST_FRAME = (1 << 32) - 1  # bytes; what the trainer sends is trusted
_TRACE = 8000  # characters of a traceback
_OWN = (__file__, batched.__file__, "<string>")  # frames of this process, not of the user
_NAMES = ("data_source", "solution_str", "ground_truth", "extra_info")


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
      score: maps the pool's arguments to the numbers of each rollout. They are empty where the function does not apply.
      budget: maps the pool's arguments to seconds that `score` may take, where that is more than the pool's limit.
        Without it the pool's limit holds.
      sandboxed: whether the function judges programs in a sandbox.
      place: the file and line where it is written.
      reader: the module that reads ground truths for it, or an empty text; see `load`.
    """

    signature: str
    needs: tuple[str, ...]
    truths: tuple[str, ...]
    score: Callable[[Any], list[dict[str, float]]]
    budget: Callable[[Any], float] | None = None
    sandboxed: bool = False
    instead: tuple[str, ...] = ()
    place: str = ""
    reader: str = ""


def load(path: str, code: str = "") -> Loaded:
    """Returns the reward function of `pkg.mod:fn` or `file.py:fn`, with either signature.

    `code`: the function itself as text (rewards/carried.py); `path` then only names it.

    rewards/batched.py says which functions have TRL's signature. Any other has verl's. Its arguments are passed by
    name, in any order, if it has verl's names, else by position. Either may be async. Attributes of a function:

    - `needs_truth`, a bool: whether every prompt must have a ground truth. Without it, functions of verl's signature need
      one, and functions of TRL's need the columns of batched.TRUTHS that they name without a default.
    - `instead_of_truth`, names of columns: a prompt with one of them needs no ground truth.
    - `reader`, the name of a module with two functions of (ground_truth, extra_info). `refusal` returns why the two score
      nothing, so that a run refuses their row. `gold` returns a text that scores 1. Either may return an empty text. The
      trainer imports the module.
    - `prepare`, a function without arguments: it is called once, when the function is loaded.

    Raises:
      Refused: no such module, file or function, not callable, or neither signature fits.
    """
    name = path.rpartition(":")[2]
    function = pickle.loads(base64.b64decode(code)) if code else _found(path)
    if not callable(function):
        raise Refused(f"reward function {path!r}: {name!r} is a {type(function).__name__}, not a function")
    getattr(function, "prepare", lambda: None)()
    signature = inspect.signature(function)
    if batched.is_batched(signature):
        return _batched(path, name, function, signature)
    truths = ("",) if _needs_truth(path, function, True) else ()
    given = getattr(function, "budget", None)
    budget = None if given is None else (lambda values: float(given(*values)))
    sandboxed = bool(getattr(function, "sandboxed", False))
    instead = tuple(getattr(function, "instead_of_truth", ()))
    more = (budget, sandboxed, instead, _defined(function), str(getattr(function, "reader", "")))
    if _binds(signature, (), dict.fromkeys(_NAMES)):
        named = lambda values: function(**dict(zip(_NAMES, values, strict=True)))  # noqa: E731
        return Loaded("verl", (), truths, _one(named), *more)
    if _binds(signature, _NAMES, {}):
        return Loaded("verl", (), truths, _one(lambda values: function(*values)), *more)
    raise Refused(
        f"reward function {path!r}: {name}{signature} does not take the four arguments {', '.join(_NAMES)}, "
        "nor TRL's (prompts, completions, completion_ids, **columns)"
    )


def _one(function: Callable[[Any], Any]) -> Callable[[Any], list[dict[str, float]]]:
    """Returns a function of verl's signature that gives the numbers of its one rollout."""
    return lambda values: [verdict(batched.waited(function(values)))]


def _needs_truth(path: str, function: Callable, otherwise: bool | None) -> bool | None:
    """Returns a function's attribute `needs_truth`, or `otherwise` where it has none."""
    needs = getattr(function, "needs_truth", otherwise)
    if needs is not otherwise and not isinstance(needs, bool):
        raise Refused(f"reward function {path!r}: its attribute needs_truth must be True or False, got {needs!r}")
    return needs


def _batched(path: str, name: str, function: Callable, signature: inspect.Signature) -> Loaded:
    """Returns a function of TRL's signature."""
    try:
        needs = batched.columns(signature)
    except ValueError as error:
        raise Refused(f"reward function {path!r}: {name}{signature} {error}") from None
    needed = _needs_truth(path, function, None)
    truths = () if needed is False else tuple(n for n in needs if n in batched.TRUTHS) or (("",) if needed else ())
    return Loaded("trl", needs, truths, batched.scorer(function, signature), place=_defined(function))


def _defined(function: Callable) -> str:
    """Returns file and line where a function is written, or an empty text."""
    code = getattr(inspect.unwrap(function), "__code__", None)
    return f"{code.co_filename}:{code.co_firstlineno}" if code else ""


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
    die_with(parent)
    os.set_inheritable(fd, False)
    channel, buffer = socket.socket(fileno=fd), bytearray()
    first = _receive(channel, buffer)
    paths, task, functions = first["functions"], None, []

    def last_word(kind, error, trace):
        if task is None:
            known = kind is Refused
            told = words(error, trace, [path.rpartition(":")[0] for path in paths])
            place = f" at {told['place']}" if told["place"] else ""
            text = f"a reward function of {paths} cannot be loaded: {told['failed']}{place}"
            channel.sendall(pack({"refused": str(error) if known else text}))
        else:
            function = functions[task["function"]]
            told = words(error, trace, [function.place.rpartition(":")[0]])
            told["place"] = told["place"] or function.place
            channel.sendall(pack({"task": task["task"]} | told))

    sys.excepthook = last_word
    functions += [load(path, first["code"].get(path, "")) for path in paths]
    sandbox = _confined(functions, first["sandbox"])
    ready = [[one.signature, one.needs, one.truths, one.instead, one.reader] for one in functions]
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
            if function.signature != "verl":
                raise  # of a group it cannot be known which program ran over
            numbers, overrun = [verdict(error.args[0] if error.args else 0.0)], True
        spent = {"seconds": time.monotonic() - begun, "restarts": counts.pop("restarts", 0)}
        channel.sendall(pack(about | {"numbers": numbers, "overrun": overrun} | spent))


def words(error: BaseException, trace: Any, files: Sequence[str]) -> dict[str, str]:
    """Describes an exception of a reward function: what it says, where in the user's code, and the traceback.

    `files`: of the reward functions. The place is the last line of theirs, else the last line of all.
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
