"""Tool calls in the text of a turn, as the chat templates of three families ask for them.

- hermes (Qwen 2.5 and 3, Hermes): <tool_call>{"name": ..., "arguments": {...}}</tool_call>, any number of them.
- llama3 (Llama 3.1 to 3.3): the whole turn is one JSON object {"name": ..., "parameters": {...}}, with or without
  <|python_tag|> before it; several are separated by semicolons.
- mistral: [TOOL_CALLS] and a JSON list of {"name": ..., "arguments": {...}}, or [TOOL_CALLS]name[ARGS]{...} of later models.

Invariant: a call that is no valid JSON, or names no function, stays a part of the text. Nothing is repaired. So every call
can be sent as JSON and read again: NaN, halves of surrogate pairs and more than 64 levels are no call.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Iterator
from typing import Any

from jaxrl_post import json_text

_HERMES = re.compile(r"<tool_call>(.*?)</tool_call>", re.DOTALL)
_PYTHON, _TOOL_CALLS = "<|python_tag|>", "[TOOL_CALLS]"
_NAMED = re.compile(r"([\w.-]+)(?:\[CALL_ID\][\w-]*)?\[ARGS\]")
_DECODER = json.JSONDecoder()


def none(text: str) -> tuple[str, list[dict]]:
    """Returns the text without calls."""
    return text, []


def hermes(text: str) -> tuple[str, list[dict]]:
    """Returns the text around the calls, and the calls."""
    calls: list[dict] = []

    def taken(found: re.Match) -> str:
        call = _call(_parsed(found[1]), "arguments")
        calls.extend([call] if call else [])
        return "" if call else found[0]

    rest = _HERMES.sub(taken, text)
    return (rest.strip() if calls else text), calls


def llama3(text: str) -> tuple[str, list[dict]]:
    """Returns the text before the calls, and the calls."""
    before, tag, after = text.rpartition(_PYTHON)
    body = (after if tag else text).strip()
    calls = [_call(value, "parameters", "arguments") for value in _values(body, ";")]
    if not calls or None in calls:
        return text, []
    return before.strip(), [call for call in calls if call]


def mistral(text: str) -> tuple[str, list[dict]]:
    """Returns the text before the calls, and the calls."""
    before, tag, after = text.partition(_TOOL_CALLS)
    listed, named = _parsed(after), after.split(_TOOL_CALLS)
    calls = [_call(one, "arguments") for one in listed] if isinstance(listed, list) else list(map(_named, named))
    if not tag or not calls or None in calls:
        return text, []
    return before.strip(), [call for call in calls if call]


PARSERS: dict[str, Callable[[str], tuple[str, list[dict]]]] = {
    "none": none,
    "hermes": hermes,
    "llama3": llama3,
    "mistral": mistral,
}


def message(text: str, parser: str) -> dict[str, Any]:
    """Returns an assistant's message as chat templates take it: content, and `tool_calls` where there are any.

    An id is nine letters and digits that follow from the text and the place of the call."""
    content, calls = PARSERS[parser](text)
    if not calls:
        return {"role": "assistant", "content": text}
    told = [{"id": _id(text, place), "type": "function", "function": call} for place, call in enumerate(calls)]
    return {"role": "assistant", "content": content, "tool_calls": told}


def _id(text: str, place: int) -> str:
    return hashlib.blake2b(f"{place}\x1f{text}".encode(), digest_size=8).hexdigest()[:9]


def _call(value: Any, *names: str) -> dict | None:
    """Returns name and arguments of a call, or None where a value is none."""
    if not isinstance(value, dict) or not isinstance(value.get("name"), str):
        return None
    arguments = next((value[name] for name in names if name in value), {})
    if isinstance(arguments, str):
        arguments = _parsed(arguments)
    return _sent({"name": value["name"], "arguments": arguments}) if isinstance(arguments, dict) else None


def _sent(call: dict) -> dict | None:
    """Returns a call, or None where JSON that others read cannot hold it."""
    try:
        json_text.parsed(json.dumps(call, allow_nan=False), "a call")
    except (ValueError, RecursionError):
        return None
    return call


def _named(text: str) -> dict | None:
    """Returns a call of the form name[ARGS]{...}."""
    found = _NAMED.match(text.strip())
    arguments = _parsed(text.strip()[found.end() :]) if found else None
    return _sent({"name": found[1], "arguments": arguments}) if found and isinstance(arguments, dict) else None


def _parsed(text: str) -> Any:
    """Returns a JSON value, or None for anything else."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None


def _values(text: str, separator: str) -> Iterator[Any]:
    """Yields JSON values with a separator between them. None follows where anything else stands."""
    place = 0
    while place < len(text):
        try:
            value, place = _DECODER.raw_decode(text, place)
        except (ValueError, RecursionError):
            yield None
            return
        yield value
        rest = text[place:].lstrip()
        if rest and not rest.startswith(separator):
            yield None
            return
        place = len(text) - len(rest.removeprefix(separator).lstrip())
