"""The values of a command's flags: read, counted and turned into numbers."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from jaxrl_post.json_text import shown
from jaxrl_post.launch import command_line


def read(
    command: str,
    arguments: Sequence[str],
    known: Sequence[str],
    numbers: Mapping[str, Callable[[str], Any]],
    *,
    needed: Sequence[str] = (),
    several: Sequence[str] = (),
) -> tuple[dict[str, Any], tuple[str, ...]]:
    """Returns the values of flags by name, and the overrides of a config. With --help, nothing is needed.

    Args:
      known: as in command_line.read.
      numbers: what turns the text of a flag into its number.
      several: flags that may come again; their values are lists.

    Raises:
      ValueError: an unknown flag, one that is missing or comes twice, or a value that is no number.
    """
    given: dict[str, Any] = {}
    overrides: list[str] = []
    for name, value in command_line.read(arguments, known):
        if name == command_line.OVERRIDE:
            overrides.append(value)
        elif name in several:
            given.setdefault(name, []).append(value)
        elif name in given:
            raise ValueError(f"{command}: {name} is given twice, as {shown(str(given[name]))} and {shown(value)}")
        else:
            given[name] = _number(command, name, value, numbers[name]) if name in numbers else value
    missing = [name for name in needed if name not in given]
    if missing and "--help" not in given:
        forms = [form for form in known if form.partition(" ")[0] in missing]
        raise ValueError(f"{command}: {', '.join(forms)} must be given; --help tells more")
    return given, tuple(overrides)


def _number(command: str, name: str, value: str, kind: Callable[[str], Any]) -> Any:
    try:
        return kind(value)
    except ValueError:
        what = "a whole number" if kind is int else "a number"
        raise ValueError(f"{command}: {name} must be {what}, got {shown(value)}") from None
