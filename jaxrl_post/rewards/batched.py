"""Calls of a reward function with TRL's signature: once for a whole group, with lists of one length.

- A function has TRL's signature if it names `completions`, `completion_ids` or `completions_ids`. It may be `async`.
- It gets only the arguments that it names, unless it has **kwargs.
- `log_metric(name, value)` makes a number a component of every rollout that the function scored.
- `log_extra(column, values)` makes numbers components, one for each completion. Other values are printed.
- Refused: a function that needs `trainer_state`, because scores depend on texts alone.

It imports neither jax nor numpy, because reward processes run it.
"""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

MARKS = ("completions", "completion_ids", "completions_ids")  # its documentation writes the last, its code the second
LOGS = ("log_metric", "log_extra")
GIVEN = ("prompts", *MARKS, "rollout")  # lists of every call; no column may have such a name
STATE = "trainer_state"
TRUTHS = ("ground_truth", "answer", "solution")  # names of TRL's columns that hold a ground truth
_LARGEST = 3.4e38  # rewards are float32
_BY_NAME = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)


def is_batched(signature: inspect.Signature) -> bool:
    """Returns whether a function has TRL's signature."""
    return any(name in signature.parameters for name in MARKS)


def columns(signature: inspect.Signature) -> tuple[str, ...]:
    """Returns the columns that a function needs: arguments without a default that are not given by the call itself.

    Raises:
      ValueError: an argument cannot be given, with the reason.
    """
    if any(one.kind is inspect.Parameter.POSITIONAL_ONLY for one in signature.parameters.values()):
        raise ValueError("must take its arguments by name")
    needed = [
        name
        for name, one in signature.parameters.items()
        if one.kind in _BY_NAME and one.default is inspect.Parameter.empty
    ]
    if STATE in needed:
        raise ValueError(f"needs {STATE!r}, which is not given: a score depends on texts alone; give it a default")
    return tuple(name for name in needed if name not in (*GIVEN, *LOGS))


def scorer(function: Callable, signature: inspect.Signature) -> Callable[[dict], list[dict[str, float]]]:
    """Returns a function from the lists of a group to the numbers of each completion; empty where it does not apply."""

    def score(given: dict) -> list[dict[str, float]]:
        count = len(given["completions"])
        logged = _Logged(count)
        every = given | {"log_metric": logged.metric, "log_extra": logged.extra}
        if "completions_ids" not in signature.parameters:
            every.pop("completions_ids", None)
        returned = waited(function(**accepted(signature, every)))
        return [
            numbers | more if numbers else {}
            for numbers, more in zip(_numbers(returned, count), logged.of, strict=True)
        ]

    return score


def accepted(signature: inspect.Signature, given: Mapping[str, Any]) -> dict[str, Any]:
    """Returns those arguments that a function takes: all where it has **kwargs, else those that it names."""
    any_name = any(one.kind is inspect.Parameter.VAR_KEYWORD for one in signature.parameters.values())
    named = {name for name, one in signature.parameters.items() if one.kind in _BY_NAME}
    return {name: value for name, value in given.items() if any_name or name in named}


def waited(returned: Any) -> Any:
    """Returns the result of a function; that of an async function after waiting for it."""
    return asyncio.run(_awaited(returned)) if inspect.isawaitable(returned) else returned


async def _awaited(returned: Any) -> Any:
    return await returned


class _Logged:
    """What a function logs of each completion."""

    def __init__(self, count: int):
        self.of: list[dict[str, float]] = [{} for _ in range(count)]

    def metric(self, name: str, value: Any) -> None:
        """Logs one number for the whole group."""
        self.extra(name, [value] * len(self.of))

    def extra(self, column: str, values: Sequence) -> None:
        """Logs one value for each completion."""
        values = _listed(values)
        if values is None or len(values) != len(self.of):
            raise ValueError(f"log_extra({column!r}) needs a list of {len(self.of)} values, one for each completion")
        if column in ("score", "acc"):
            raise ValueError(f"{column!r} cannot be logged: it is what the function returns")
        numbers = [number(value) for value in values]
        if None in numbers:
            print(f"{column}: {values!r}")
            return
        for logged, value in zip(self.of, numbers, strict=True):
            logged[str(column)] = value


def _numbers(returned: object, count: int) -> list[dict[str, float]]:
    """Returns the numbers of each completion.

    Raises:
      ValueError: no list, a list of another length, or a member that is neither a finite number, a dict nor None.
    """
    values = _listed(returned)
    if values is None:
        raise ValueError(f"it must return a list of {count} numbers or None, one per completion; got {returned!r:.80}")
    if len(values) != count:
        raise ValueError(
            f"it returned a list of {len(values)} for a group of {count} completions; it must return one number or "
            "None per completion"
        )
    return [{} if value is None else verdict(value) for value in values]


def _listed(values: object) -> list | None:
    """Returns a list, a tuple, an array or a tensor as a list; None for anything else."""
    plain = values.tolist() if hasattr(values, "tolist") else values
    return list(plain) if isinstance(plain, (list, tuple)) else None


def verdict(returned: object) -> dict[str, float]:
    """Returns the numbers in a reward function's result: "score", "acc" where given, and every other finite number.

    Raises:
      ValueError: no score, or a score or acc that is no finite number.
    """
    given = returned if isinstance(returned, Mapping) else {"score": returned}
    if "score" not in given:
        raise ValueError(f"the dict has no 'score', only {sorted(map(str, given))}")
    numbers = {str(name): known for name, value in given.items() if (known := number(value)) is not None}
    for name in ("score", "acc"):
        if name in given and name not in numbers:
            raise ValueError(f"{name} is {given[name]!r}, which is no finite number")
    return numbers


def number(value: object) -> float | None:
    """Returns a number or a one-element array as a float; None for anything else and for what is not finite."""
    if hasattr(value, "item") and getattr(value, "size", 1) == 1:
        value = value.item()
    if not isinstance(value, (int, float)):
        return None
    return float(value) if abs(value) <= _LARGEST else None  # False for NaN too
