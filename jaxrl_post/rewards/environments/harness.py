"""The options of an environment that a harness outside plays: `environment.arguments` of the name "harness".

A row's conversation begins with the row's own prompt: its messages, or one message of the user with its text.
"""

from __future__ import annotations

import difflib
import json
from collections.abc import Mapping
from typing import Any, NamedTuple

from jaxrl_post.ring.json_text import shown

PORTS = 65535


class Where(NamedTuple):
    """Where harnesses are heard, and the JSON schemas of functions that the chat template shows to the policy."""

    host: str = "127.0.0.1"
    port: int = 8100
    tools: tuple[Mapping, ...] = ()


def read(arguments: Mapping[str, Any]) -> Where:
    """Returns the options.

    Raises:
      ValueError: there is no such argument, or its value is wrong.
    """
    for name in arguments:
        if name not in Where._fields:
            near = difflib.get_close_matches(name, Where._fields, n=1, cutoff=0.0)
            raise ValueError(f"environment.arguments has no {name!r} for a harness; the nearest is {near[0]!r}")
    found = Where(**arguments)
    if not isinstance(found.host, str) or not found.host:
        raise ValueError(
            f"environment.arguments.host={shown(found.host)} must be an address; the nearest is '127.0.0.1'"
        )
    if isinstance(found.port, bool) or not isinstance(found.port, int) or not 0 <= found.port <= PORTS:
        raise ValueError(
            f"environment.arguments.port={shown(found.port)} must be a whole number from 0, a free one, to {PORTS}"
        )
    return found._replace(tools=tuple(_tool(place, one) for place, one in enumerate(_listed(found.tools))))


def _listed(tools: Any) -> list | tuple:
    if not isinstance(tools, (list, tuple)):
        raise ValueError(f"environment.arguments.tools={shown(tools)} must be a list of functions")
    return tools


def _tool(place: int, one: Any) -> Mapping:
    """Returns a function's schema as plain JSON."""
    about = one.get("function") if isinstance(one, Mapping) and one.get("type") == "function" else None
    if not isinstance(about, Mapping) or not isinstance(about.get("name"), str):
        raise ValueError(
            f"environment.arguments.tools[{place}]={shown(one)} must be "
            '{"type": "function", "function": {"name": ...}}'
        )
    return json.loads(json.dumps(one))


def reset(row: Mapping) -> list[dict]:
    """Returns the messages that a row's conversation begins with."""
    prompt = row["prompt"]
    return [{"role": "user", "content": prompt}] if isinstance(prompt, str) else [dict(one) for one in prompt]
