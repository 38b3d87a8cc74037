"""Tool calls that families write in tags of their own. The formats have no JSON (data/tool_calls.py has the others).

- qwen3_coder (Qwen3-Coder, Qwen3-Next, Qwen3.5): <tool_call><function=NAME><parameter=NAME>value</parameter></function></tool_call>,
  with any number of parameters, and each tag and each value on lines of its own. The last tag may be missing where the text
  ends or another call begins. A value is text, unless the schema of the function says otherwise. Then it is JSON, or True, False
  and None, as the chat template writes them.
- gemma4: <|tool_call>call:NAME{key:value,...}<tool_call|>. A text stands between two <|"|>. Other values are those of JSON, and
  keys stand bare at every level.

A reader begins behind the tag that opens a call. It returns the call, or None, and the place behind it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

_NAME = r"[\w.-]+"
_FUNCTION = re.compile(rf"\s*<function=({_NAME})>\s*")
_END = r"</function>\s*(?:</tool_call>|(?=<tool_call>)|\Z)"
_FUNCTION_END = re.compile(_END)
# What looks like an end inside of a value is none: another parameter or the end of the function has to follow.
_PARAMETER = re.compile(rf"<parameter=([^>\n]+)>\n?((?s:.*?))\n?</parameter>\s*(?=<parameter=[^>\n]+>|{_END})")
_LITERALS = {"True": True, "False": False, "None": None}
_KINDS: dict[str, Callable[[Any], bool]] = {
    "integer": lambda value: isinstance(value, int) and not isinstance(value, bool),
    "number": lambda value: isinstance(value, int | float) and not isinstance(value, bool),
    "boolean": lambda value: isinstance(value, bool),
    "array": lambda value: isinstance(value, list),
    "object": lambda value: isinstance(value, dict),
    "null": lambda value: value is None,
}

_CALL = re.compile(rf"\s*call:({_NAME})\s*(?=\{{)")
_CALL_END = re.compile(r"\s*(?:<tool_call\|>|\Z)")
_PART = re.compile(r'\s*(?:<\|"\|>(?P<text>(?s:.*?))<\|"\|>|(?P<mark>[{}\[\],:])|(?P<bare>[^\s{}\[\],:<>|"]+))')
_KEY_END = re.compile(r"\s*:")


def qwen3_coder(text: str, begin: int, tools: Sequence[Mapping]) -> tuple[dict | None, int]:
    found = _FUNCTION.match(text, begin)
    if not found:
        return None, begin
    kinds, arguments, place = _kinds(tools, found[1]), {}, found.end()
    while one := _PARAMETER.match(text, place):
        arguments[one[1]] = _typed(one[2], kinds.get(one[1], frozenset()))
        place = one.end()
    end = _FUNCTION_END.match(text, place)
    return ({"name": found[1], "arguments": arguments}, end.end()) if end else (None, begin)


def gemma4(text: str, begin: int, tools: Sequence[Mapping]) -> tuple[dict | None, int]:
    found = _CALL.match(text, begin)
    written, place = _as_json(text, found.end()) if found else ("", begin)
    end = _CALL_END.match(text, place)
    try:
        return ({"name": found[1], "arguments": json.loads(written)}, end.end()) if found and end else (None, begin)
    except (ValueError, RecursionError):
        return None, begin


def _kinds(tools: Sequence[Mapping], name: str) -> dict[str, frozenset[str]]:
    """Returns the types that the schema of a function names for each of its parameters."""
    for tool in tools:
        function = tool.get("function", tool)
        if isinstance(function, Mapping) and function.get("name") == name:
            schema = function.get("parameters")
            named = schema.get("properties") if isinstance(schema, Mapping) else None
            return {key: _types(one) for key, one in named.items()} if isinstance(named, Mapping) else {}
    return {}


def _types(schema: Any) -> frozenset[str]:
    """Returns the types that a schema names. What is no schema names none."""
    if not isinstance(schema, Mapping):
        return frozenset()
    kind = schema.get("type")
    own = [one for one in (kind if isinstance(kind, list) else [kind]) if isinstance(one, str)]
    several = [one for name in ("anyOf", "oneOf") if isinstance(schema.get(name), list) for one in schema[name]]
    return frozenset(own).union(*map(_types, several))


def _typed(text: str, kinds: frozenset[str]) -> Any:
    """Returns the value that a parameter's text is under its types. A text stays one where none of them fits."""
    wanted = kinds & {"null"} if "string" in kinds else kinds
    try:
        value = _LITERALS[text] if text in _LITERALS else json.loads(text)
    except (ValueError, RecursionError):
        return text
    return value if any(_KINDS[kind](value) for kind in wanted & _KINDS.keys()) else text


def _as_json(text: str, place: int) -> tuple[str, int]:
    """Returns a value of gemma4's format as JSON, and the place behind it. What breaks the format is no valid JSON."""
    parts: list[str] = []
    depth = 0
    while found := _PART.match(text, place):
        mark, quoted, bare, place = found["mark"], found["text"], found["bare"], found.end()
        if mark:
            depth += {"{": 1, "[": 1, "}": -1, "]": -1}.get(mark, 0)
        elif quoted is not None or _KEY_END.match(text, place):
            mark = json.dumps(bare if quoted is None else quoted)
        parts.append(mark or ("null" if bare == "None" else bare))
        if depth <= 0:
            break
    return " ".join(parts), place
