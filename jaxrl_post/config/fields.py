"""How an option is declared in the schema: its default, its range or choices, and what the reader of a config must know.

Every kind of option takes the same words:

- `doc`: what the option does, in one or two sentences.
- `unit`: what its number counts.
- `used_when`: the condition on other options under which anything reads it (conditions.py).
- `why`: the reason for that condition.
- `recorded`: a resumed run has the value of its start where the option is left at its default.
- `accelerator`: the default on a TPU or GPU, where it is another one. A config file that leaves such an option alone has
  AUTO there, and `resolve` makes it definite.
"""

from __future__ import annotations

import dataclasses
import functools
import typing
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from jaxrl_post.config import conditions

AUTO = "auto"


@dataclass(frozen=True, kw_only=True)
class About:
    """What the schema says of an option beside its name, its type and its default."""

    low: float | None = None
    high: float | None = None
    choices: tuple[str, ...] = ()
    path: bool = False
    bucket: bool = False
    written: bool = False
    unit: str = ""
    doc: str = ""
    used_when: conditions.Condition = conditions.Condition()
    why: str = ""
    accelerator: Any = None
    recorded: bool = False


def at_least(default, low, high=None, **words):
    """Declares a number with an inclusive range."""
    return _declared(default, low=low, high=high, **words)


def one_of(default, *choices, **words):
    """Declares a text with a closed list of values."""
    return _declared(default, choices=choices, **words)


def any_of_type(default, **words):
    """Declares a value of which only the type is checked."""
    return _declared(default, **words)


def file_path(default, **words):
    """Declares the path of a file or folder, or a list of them; a URL is refused.

    `written`: the run makes it. All others are read, and a relative one may lie beside the config file.
    """
    return _declared(default, path=True, **words)


def input_path(default, **words):
    """Declares the path of a file or folder that is read. It may also be SCHEME://BUCKET/NAME."""
    return file_path(default, bucket=True, **words)


def switch(**words):
    """Declares a form of a program that can be chosen. `on` says whether it is used."""
    return one_of("auto", "auto", "yes", "no", **words)


def on(given: str, platform: str) -> bool:
    """Returns whether a form is used. "auto" uses it on every platform but the CPU.

    Args:
      platform: of the devices, as jax names it.
    """
    return given == "yes" or (given == "auto" and platform != "cpu")


def mapping(**words):
    """Declares a mapping with names of its own; it is empty by default."""
    return field(default_factory=dict, metadata=_said(**words))


def _declared(default, **words):
    return field(default=default, metadata=_said(**words))


def _said(*, used_when: str = "", **words) -> dict[str, Any]:
    return words | {"used_when": conditions.parse(used_when)}


@dataclass(frozen=True, kw_only=True)
class Option:
    """One option of a schema: its full name (`engine.slots`), its type, its default, and what the schema says of it."""

    name: str
    kind: Any
    default: Any
    about: About


def about(f: dataclasses.Field) -> About:
    """Returns what the schema says of a field."""
    return About(**f.metadata)


@functools.cache
def members(schema: type) -> dict[str, tuple[Any, dataclasses.Field]]:
    """Returns type and field of every member of a dataclass, by name; a member may be a section."""
    hints = typing.get_type_hints(schema)
    return {f.name: (hints[f.name], f) for f in dataclasses.fields(schema)}


def options(schema: type, where: str = "") -> Iterator[Option]:
    """Yields every option of a schema and of its sections, in the order of the schema."""
    for name, (kind, f) in members(schema).items():
        full = f"{where}.{name}" if where else name
        if dataclasses.is_dataclass(kind):
            yield from options(kind, full)
        else:
            default = {} if f.default is dataclasses.MISSING else f.default
            yield Option(name=full, kind=kind, default=default, about=about(f))
