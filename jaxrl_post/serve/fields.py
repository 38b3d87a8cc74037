"""Readers of the fields of a request's body: each takes a name and a value, and returns the value or refuses it.

A field that is null counts as left out, and no reader sees it.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Mapping
from typing import Any

from jaxrl_post.json_text import shown
from jaxrl_post.serve.refusal import Refusal, wrong

Reader = Callable[[str, Any], Any]

_ALIKE = 0.7  # of two names, from which on one is taken for a slip of the other
_LONG = 240  # characters of a list of names


def read(body: Mapping[str, Any], readers: Mapping[str, Reader]) -> dict[str, Any]:
    """Returns the values of the fields that a body gives.

    Raises:
      Refusal: an unknown field, or a wrong value.
    """
    for name in body:
        if name not in readers:
            raise Refusal(400, f"there is no field {shown(name)}; {_instead(name[:100], readers)}", name[:100])
    return {name: readers[name](name, value) for name, value in body.items() if value is not None}


def _instead(name: str, readers: Mapping[str, Reader]) -> str:
    """Returns which field was meant, or which there are."""
    near = difflib.get_close_matches(name, readers, n=1, cutoff=_ALIKE)
    if near:
        return f"the nearest is {near[0]!r}"
    listed = ", ".join(readers)
    return f"valid are {listed}" if len(listed) < _LONG else "the documentation lists those that are served"


def text(name: str, value: Any) -> str:
    """Returns a text."""
    if not isinstance(value, str):
        raise wrong(name, value, "a text")
    return value


def truth(name: str, value: Any) -> bool:
    """Returns a truth value."""
    if not isinstance(value, bool):
        raise wrong(name, value, "true or false")
    return value


def whole(least: int, most: int) -> Reader:
    """Returns a reader of whole numbers, both ends included."""

    def reader(name: str, value: Any) -> int:
        if isinstance(value, bool) or not isinstance(value, int):
            raise wrong(name, value, f"a whole number from {least} to {most}")
        if not least <= value <= most:
            raise wrong(name, value, f"a whole number from {least} to {most}", str(min(max(value, least), most)))
        return value

    return reader


def number(least: float, most: float, *, above: bool = False, zero: bool = False) -> Reader:
    """Returns a reader of numbers up to `most`, from `least` or, with `above`, above it. `zero`: 0 is read, too."""
    span = f"{'0 or ' if zero else ''}a number {'above' if above else 'from'} {least:g} {'and at most' if above else 'to'} {most:g}"

    def reader(name: str, value: Any) -> float:
        if isinstance(value, bool) or not isinstance(value, (int, float)) or value != value:
            raise wrong(name, value, span)
        if not (least <= value <= most or (zero and value == 0)) or (above and value == least):
            near = "0" if zero and value < least else "" if above else f"{least:g}"
            raise wrong(name, value, span, f"{most:g}" if value > most else near)
        return float(value)

    return reader


def texts(most: int) -> Reader:
    """Returns a reader of a text or a list of up to `most` texts. None of them may be empty."""

    def reader(name: str, value: Any) -> tuple[str, ...]:
        listed = [value] if isinstance(value, str) else value
        if not isinstance(listed, list) or not all(isinstance(one, str) and one for one in listed):
            raise wrong(name, value, "a text or a list of texts, none of them empty")
        if len(listed) > most:
            raise Refusal(400, f"{name} has {len(listed)} texts; at most {most} are served", name)
        return tuple(listed)

    return reader


def ids(name: str, value: Any) -> tuple[int, ...]:
    """Returns token ids."""
    if not isinstance(value, list) or not all(isinstance(one, int) and not isinstance(one, bool) for one in value):
        raise wrong(name, value, "a list of token ids")
    return tuple(value)


def only(allowed: Any, why: str, *, instead: str = "leave it out") -> Reader:
    """Returns a reader of a field that is not served. `allowed`: the one value that asks for nothing; None: there is none.

    `instead`: what the sentence of a refusal says last."""

    def reader(name: str, value: Any) -> Any:
        if value != allowed or isinstance(value, bool) != isinstance(allowed, bool):
            raise Refusal(400, f"{name}={shown(value)} is not served: {why}; {instead}", name)
        return value

    return reader


def anything(name: str, value: Any) -> Any:
    """Returns the value of a field that changes no token and no part of the response."""
    return value
