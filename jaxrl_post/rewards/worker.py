"""The reward functions of a reward process: how they are loaded, and how they score (rewards/child.py)."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from jaxrl_post.rewards import Overrun, batched
from jaxrl_post.rewards.batched import verdict
from jaxrl_post.rewards.child import Refused, Service, found, serve
from jaxrl_post.rewards.sandbox import Unavailable

_NAMES = ("data_source", "solution_str", "ground_truth", "extra_info")


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
    function = found(path, code)
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


def _binds(signature: inspect.Signature, positional, named) -> bool:
    try:
        signature.bind(*positional, **named)
    except TypeError:
        return False
    return True


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


class GraderService(Service):
    """The reward functions of a process. `first`: their paths, their code, the sandbox's level."""

    def __init__(self, first: Mapping):
        self._first, self._functions = first, []
        self.what = f"a reward function of {first['functions']}"
        self.files = [path.rpartition(":")[0] for path in first["functions"]]

    def load(self) -> dict:
        self._functions = [load(path, self._first["code"].get(path, "")) for path in self._first["functions"]]
        sandbox = _confined(self._functions, self._first["sandbox"])
        ready = [[one.signature, one.needs, one.truths, one.instead, one.reader] for one in self._functions]
        return {"ready": ready, "sandbox": sandbox}

    def place(self, task: Mapping) -> str:
        return self._functions[task["function"]].place

    def budget(self, task: Mapping) -> float | None:
        budget = self._functions[task["function"]].budget
        return budget and budget(task["arguments"])

    def answer(self, task: Mapping) -> dict:
        function = self._functions[task["function"]]
        try:
            return {"numbers": function.score(task["arguments"]), "overrun": False}
        except Overrun as error:
            if function.signature != "verl":
                raise  # of a group it cannot be known which program ran over
            return {"numbers": [verdict(error.args[0] if error.args else 0.0)], "overrun": True}


main = functools.partial(serve, made=GraderService)
