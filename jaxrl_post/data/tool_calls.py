"""Tool calls in the text of a turn, as the chat templates of five families ask for them.

- hermes (Qwen 2.5 and 3, Hermes): <tool_call>{"name": ..., "arguments": {...}}</tool_call>, any number of them. The closing
  tag may be missing at the end of the text and before the next call.
- llama3 (Llama 3.1 to 3.3): the whole turn is one JSON object {"name": ..., "parameters": {...}}, with or without
  <|python_tag|> before it; several are separated by semicolons.
- mistral: [TOOL_CALLS] and a JSON list of {"name": ..., "arguments": {...}}, or [TOOL_CALLS]name[ARGS]{...} of later models.
- qwen3_coder (Qwen3-Coder, Qwen3-Next, Qwen3.5) and gemma4: in tags of their own (tagged_calls.py).

A family with JSON may name the arguments `arguments` or `parameters`. Thinking holds no calls. It stands between <think> and
</think>, [THINK] and [/THINK], or <|channel> and <channel|>. The end may be missing, and the beginning too where the template
wrote it.

Invariant: a call that breaks its format, names no function, or may have its arguments under another name, stays a part of the
text. Nothing is repaired. So every call can be sent as JSON and read again: NaN, halves of surrogate pairs and more than 64
levels are no call.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from jaxrl_post.data import tagged_calls
from jaxrl_post.ring import json_text

# A parser gets a text and the schemas of its tools, and returns the text without its calls, and the calls.
Parser = Callable[[str, Sequence[Mapping]], tuple[str, list[dict]]]
# Reads the call behind an opening tag, and returns it, or None, and the place behind it.
Reader = Callable[[str, int, Sequence[Mapping]], tuple[dict | None, int]]

_THINKING = (("<think>", "</think>"), ("[THINK]", "[/THINK]"), ("<|channel>", "<channel|>"))
_THOUGHT = "|".join(rf"{re.escape(begin)}.*?(?:{re.escape(end)}|\Z)" for begin, end in _THINKING)
_END_OF_CALL = re.compile(r"\s*(?:</tool_call>|(?=<tool_call>)|\Z)")
_WHOLE_CALL = re.compile(r"<tool_call>.*?</tool_call>|<\|tool_call>.*?<tool_call\|>", re.DOTALL)
_BESIDE = {"name", "id", "type"}  # keys of a call that are no arguments
_PYTHON, _TOOL_CALLS = "<|python_tag|>", "[TOOL_CALLS]"
_NAMED = re.compile(r"([\w.-]+)(?:\[CALL_ID\][\w-]*)?\[ARGS\]")
_DECODER = json.JSONDecoder()


def none(text: str, tools: Sequence[Mapping]) -> tuple[str, list[dict]]:
    return text, []


def _tagged(tag: str, read: Reader) -> Parser:
    """Returns the parser of a format in which a tag opens each call."""
    pattern = re.compile(rf"{_THOUGHT}|({re.escape(tag)})\s*", re.DOTALL)

    def parsed(text: str, tools: Sequence[Mapping]) -> tuple[str, list[dict]]:
        calls: list[dict] = []
        rest, place = "", 0
        while found := pattern.search(text, place):
            call, end = read(text, found.end(), tools) if found[1] else (None, found.end())
            sent = _sent(call) if call else None
            calls.extend([sent] if sent else [])
            rest += text[place : found.start() if sent else found.end()]
            place = end if sent else found.end()
        return ((rest + text[place:]).strip() if calls else text), calls

    return parsed


def _hermes(text: str, begin: int, tools: Sequence[Mapping]) -> tuple[dict | None, int]:
    try:
        value, end = _DECODER.raw_decode(text, begin)
    except (ValueError, RecursionError):
        return None, begin
    closed = _END_OF_CALL.match(text, end)
    return (_call(value), closed.end()) if closed else (None, begin)


def llama3(text: str, tools: Sequence[Mapping]) -> tuple[str, list[dict]]:
    before, tag, after = text.rpartition(_PYTHON)
    body = (after if tag else text).strip()
    calls = [_call(value) for value in _values(body, ";")]
    if not calls or None in calls:
        return text, []
    return before.strip(), [call for call in calls if call]


def mistral(text: str, tools: Sequence[Mapping]) -> tuple[str, list[dict]]:
    before, tag, after = text.partition(_TOOL_CALLS)
    listed, named = _parsed(after), after.split(_TOOL_CALLS)
    calls = [_call(one) for one in listed] if isinstance(listed, list) else list(map(_named, named))
    if not tag or not calls or None in calls:
        return text, []
    return before.strip(), [call for call in calls if call]


PARSERS: dict[str, Parser] = {
    "none": none,
    "hermes": _tagged("<tool_call>", _hermes),
    "llama3": llama3,
    "mistral": mistral,
    "qwen3_coder": _tagged("<tool_call>", tagged_calls.qwen3_coder),
    "gemma4": _tagged("<|tool_call>", tagged_calls.gemma4),
}


def message(text: str, parser: str, tools: Sequence[Mapping] = ()) -> dict[str, Any]:
    """Returns an assistant's message as chat templates take it: content, and `tool_calls` where there are any.

    `tools`: JSON schemas of functions, as the template was given them. An id is nine letters and digits that follow from the
    text and the place of the call."""
    spoken = _thought(text)
    content, calls = PARSERS[parser](text[spoken:], tools)
    if not calls:
        return {"role": "assistant", "content": text}
    content = (text[:spoken] + content).strip()
    keys = [hashlib.blake2b(f"{n}\x1f{text}".encode(), digest_size=8).hexdigest()[:9] for n in range(len(calls))]
    told = [{"id": key, "type": "function", "function": call} for key, call in zip(keys, calls, strict=True)]
    return {"role": "assistant", "content": content, "tool_calls": told}


def _thought(text: str) -> int:
    """Returns the place behind the thinking with which a text begins, or 0."""
    begun = text.lstrip()
    for opening, closing in _THINKING:
        end = text.find(closing)
        if begun.startswith(opening):
            return len(text) if end < 0 else end + len(closing)
        if end < 0 or opening in text[:end] or begun.startswith(("{", _PYTHON, _TOOL_CALLS)):
            continue
        if not any(call.start() < end < call.end() for call in _WHOLE_CALL.finditer(text)):
            return end + len(closing)  # the template opened it
    return 0


def _call(value: Any) -> dict | None:
    if not isinstance(value, dict) or not isinstance(value.get("name"), str):
        return None
    given = [name for name in ("arguments", "parameters") if name in value]
    if not given and value.keys() - _BESIDE:
        return None  # its arguments may stand there
    arguments = value[given[0]] if given else {}
    if isinstance(arguments, str):
        arguments = _parsed(arguments)
    return _sent({"name": value["name"], "arguments": arguments}) if isinstance(arguments, dict) else None


def _sent(call: dict) -> dict | None:
    try:
        json_text.parsed(json.dumps(call, allow_nan=False), "a call")
    except (ValueError, RecursionError):
        return None
    return call


def _named(text: str) -> dict | None:
    found = _NAMED.match(text.strip())
    arguments = _parsed(text.strip()[found.end() :]) if found else None
    return _sent({"name": found[1], "arguments": arguments}) if found and isinstance(arguments, dict) else None


def _parsed(text: str) -> Any:
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
