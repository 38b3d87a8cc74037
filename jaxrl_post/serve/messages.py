"""Messages and tools of a chat request, in the form that chat templates take.

A template gets the arguments of an earlier call as an object, as transformers gives it, where OpenAI's form has a text of
JSON. A null is left out. Parts of other types than text, such as images, are refused.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from typing import Any

from jaxrl_post import json_text
from jaxrl_post.data.messages import check_names
from jaxrl_post.json_text import shown
from jaxrl_post.serve.refusal import Refusal

ROLES = ("system", "developer", "user", "assistant", "tool")
_KEPT = ("name", "tool_call_id", "reasoning_content")  # texts that a template may read
_MOST_TOOLS = 128


def messages(name: str, value: Any) -> tuple[dict, ...]:
    """Returns messages as a template takes them. A developer's message becomes one of the system.

    Raises:
      Refusal: there is none, or one is wrong.
    """
    if not isinstance(value, list) or not value:
        raise Refusal(400, f"{name}={shown(value)} must be a list of at least one message", name)
    return tuple(_message(f"{name}[{place}]", one) for place, one in enumerate(value))


def tools(name: str, value: Any) -> tuple[dict, ...]:
    """Returns functions as a template takes them.

    Raises:
      Refusal: one is no function with a name, or there are too many.
    """
    if not isinstance(value, list) or len(value) > _MOST_TOOLS:
        raise Refusal(400, f"{name} must be a list of at most {_MOST_TOOLS} functions", name)
    for place, one in enumerate(value):
        function = one.get("function") if isinstance(one, dict) and one.get("type") == "function" else None
        if not (isinstance(function, dict) and isinstance(function.get("name"), str) and function["name"]):
            raise Refusal(
                400,
                f'{name}[{place}]={shown(one)} must be {{"type": "function", "function": {{"name": ...}}}}',
                f"{name}[{place}]",
            )
    return tuple(value)


def _message(where: str, given: Any) -> dict[str, Any]:
    if not isinstance(given, dict):
        raise Refusal(400, f"{where}={shown(given)} must be an object with role and content", where)
    role = given.get("role")
    if role not in ROLES:
        near = difflib.get_close_matches(str(role)[:100], ROLES, n=1, cutoff=0.0)
        raise Refusal(
            400, f"{where}.role={shown(role)} must be one of {', '.join(ROLES)}; the nearest is {near[0]!r}", where
        )
    out: dict[str, Any] = {"role": "system" if role == "developer" else role}
    calls = given.get("tool_calls") or []
    if given.get("content") is not None or not calls:
        out["content"] = _content(f"{where}.content", given.get("content"))
    for name, value in given.items():
        if name in _KEPT and value is not None:
            if not isinstance(value, str):
                raise Refusal(400, f"{where}.{name}={shown(value)} must be a text", f"{where}.{name}")
            out[name] = value
        elif value and name not in ("role", "content", "tool_calls", *_KEPT):
            raise Refusal(400, f"{where}.{name}={shown(value)} is not served; leave it out", f"{where}.{name}")
    if calls:
        out["tool_calls"] = _calls(f"{where}.tool_calls", calls)
    return out


def arguments(name: str, value: Any) -> dict[str, Any]:
    """Returns chat_template_kwargs.

    Raises:
      Refusal: they are no object, or one is no argument of a template.
    """
    if not isinstance(value, dict):
        raise Refusal(400, f"{name}={shown(value)} must be an object", name)
    try:
        check_names(name, value)
    except ValueError as error:
        raise Refusal(400, str(error), name) from error
    return value


def _content(where: str, given: Any) -> str | list[dict]:
    """Returns the text of a message, or its parts."""
    if isinstance(given, list) and all(isinstance(part, dict) for part in given):
        for place, part in enumerate(given):
            if part.get("type") != "text" or not isinstance(part.get("text"), str):
                kind = f"{where}[{place}]"
                raise Refusal(400, f"{kind}={shown(part)} is not served; parts of type text are", kind)
        return given
    if not isinstance(given, str):
        raise Refusal(400, f"{where}={shown(given)} must be a text or a list of parts of type text", where)
    return given


def _calls(where: str, given: Any) -> list[dict]:
    """Returns calls of an assistant's message, their arguments as objects."""
    if not isinstance(given, list):
        raise Refusal(400, f"{where}={shown(given)} must be a list of calls", where)
    return [_call(f"{where}[{place}]", one) for place, one in enumerate(given)]


def _call(where: str, one: Any) -> dict:
    function = one.get("function") if isinstance(one, Mapping) else None
    if not (isinstance(function, dict) and isinstance(function.get("name"), str)):
        raise Refusal(400, f"{where}={shown(one)} must have a function with a name and arguments", where)
    arguments = function.get("arguments", "{}")
    if isinstance(arguments, str):
        try:
            arguments = json_text.parsed(arguments or "{}", f"{where}.function.arguments")
        except ValueError as error:
            raise Refusal(400, str(error), where) from error
    if not isinstance(arguments, dict):
        raise Refusal(400, f"{where}.function.arguments={shown(arguments)} must be a JSON object", where)
    return {**one, "type": "function", "function": {"name": function["name"], "arguments": arguments}}
