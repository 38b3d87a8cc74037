"""What a row gives its chat template: messages, tools and other arguments, in the form that transformers takes.

- A null is an absent key, at every level. Arrow writes a null for each key that another row has, and JSON that was made
  from Arrow has them, too.
- A text that is JSON of messages, or of tools, is read as that JSON, as TRL reads `tools`.
- Refused: texts of Python's objects, tools that are no JSON schemas, and arguments that are not a template's.
"""

from __future__ import annotations

import ast
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from jaxrl_post.data.chat import check_contents
from jaxrl_post.ring import json_text
from jaxrl_post.ring.json_text import shown

_SAID = ("content", "tool_calls", "reasoning_content", "thinking", "reasoning")  # a message has one of them
TOOLS, ARGUMENTS = "tools", "chat_template_kwargs"
_OTHERS = (  # of apply_chat_template, that its template does not read
    *("messages", "conversation", "add_generation_prompt", "continue_final_message", "chat_template", "tokenize"),
    *("padding", "truncation", "max_length", "return_tensors", "return_dict", "return_assistant_tokens_mask"),
    *("tokenizer_kwargs", "sanitize_control_tokens"),
)


def plain(value: Any) -> Any:
    """Returns a value without the nulls of its objects, tuples and arrays as lists. Nulls of lists stay."""
    if isinstance(value, Mapping):
        return {name: plain(member) for name, member in value.items() if member is not None}
    if isinstance(value, np.ndarray):
        value = value.tolist()
    if isinstance(value, (list, tuple)):
        return [plain(member) for member in value]
    return value


def read(where: str, value: Any) -> Any:
    """Returns messages, which may be a text of JSON, as a list without nulls. Any other text is returned as it is."""
    if not isinstance(value, str):
        return plain(value)
    if not value.lstrip()[:1] or value.lstrip()[0] not in '[{"' or "role" not in value:
        return value
    try:
        found = json_text.parsed(value, where)
    except ValueError:
        try:
            found = ast.literal_eval(value.strip())
        except (ValueError, SyntaxError, TypeError, RecursionError, MemoryError):
            return value
        if not _talk(found):
            return value
    else:
        if isinstance(found, list) and _talk(found):
            return plain(found)
    if _talk(found) or (isinstance(found, str) and _talk(read(where, found))):
        raise ValueError(
            f"{where}: is a text of messages that is no JSON list: {shown(value)}; write the list of messages itself, or its "
            "JSON"
        )
    return value


def _talk(value: Any) -> bool:
    """Returns whether a value is messages, a message, or an object that holds messages."""
    if isinstance(value, Mapping):
        return _talk(value["messages"]) if "messages" in value else {"role", "content"} <= value.keys()
    return isinstance(value, list) and bool(value) and all(_message(one) for one in value)


def _message(value: Any) -> bool:
    return (
        isinstance(value, Mapping)
        and isinstance(value.get("role"), str)
        and any(value.get(name) is not None for name in _SAID)
    )


def arguments(where: str, given: Mapping) -> dict[str, Any]:
    """Returns what a row's template may read beside messages: its column `tools`, and each name of `chat_template_kwargs`."""
    told = _parsed(f"{where}, column {ARGUMENTS!r}", given.get(ARGUMENTS))
    if told and not isinstance(told, Mapping):
        raise ValueError(f"{where}, column {ARGUMENTS!r}: must be an object, got {shown(told)}")
    out = dict(told or {})
    check_names(f"{where}, column {ARGUMENTS!r}", out)
    tools = _parsed(f"{where}, column {TOOLS!r}", given.get(TOOLS))
    if tools and not (isinstance(tools, list) and all(isinstance(one, Mapping) for one in tools)):
        raise ValueError(
            f"{where}, column {TOOLS!r}: must be a list of JSON schemas, which the chat template is given, got "
            f"{shown(tools)}; give another column of this name another name"
        )
    return out | ({TOOLS: tools} if tools else {})


def _parsed(where: str, value: Any) -> Any:
    return plain(json_text.parsed(value, where) if isinstance(value, str) and value.strip() else value)


def check_names(where: str, given: Mapping) -> None:
    """Refuses arguments that are apply_chat_template's own and not its template's."""
    for name in given:
        if name in _OTHERS or name == TOOLS or not isinstance(name, str):
            instead = f"give them in the column {TOOLS!r} of a row" if name == TOOLS else "leave it out"
            raise ValueError(f"{where}: {shown(name)} is no argument of a chat template; {instead}")


def check(where: str, value: Any) -> list[dict]:
    """Returns messages of a row, as `read` gives them, after checking their form."""
    if not isinstance(value, list) or not value:
        raise ValueError(f"{where}: must be a text or a list of messages, got {shown(str(value))}")
    for place, message in enumerate(value):
        if not _message(message):
            column, quote = (where[:-1], "'") if where.endswith("'") else (where, "")
            raise ValueError(f"{column}[{place}]{quote}: must be an object with role and content: {shown(message)}")
    check_contents(value, f"{where}: ")
    return value


def begun_by_system(messages: Sequence[Mapping], text: str) -> list[Mapping]:
    """Returns messages that begin with a system message of this text, unless they have one of their own."""
    own = bool(messages) and messages[0]["role"] in ("system", "developer")
    return [*messages] if own or not text else [{"role": "system", "content": text}, *messages]
