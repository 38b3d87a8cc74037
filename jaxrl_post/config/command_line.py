"""The command line: the one parser, of a run, of a simulation and of every command.

A value stands behind "=" or as the next argument. No flag may be abbreviated. Every mistake is one ValueError.
"""

from __future__ import annotations

import argparse
import difflib
import functools
import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from jaxrl_post.ring.json_text import shown

OVERRIDE = "--config.a.b=VALUE"
_OVERRIDES = "--config."


@dataclass(frozen=True)
class Flag:
    """An argument of a command.

    - `form`: "--json" is a switch, "--out=FILE" has a value, "--resume[=FOLDER]" may have one, and "RUN" has no name. One
      that ends with " ..." may be given several times.
    - `text`: its help.
    - `type`: reads its value.
    - `default`: its value where it is not given. A value may be empty where the default is None.
    """

    form: str
    text: str
    type: Callable[[str], Any] = str
    default: Any = ""
    required: bool = False
    choices: Sequence[str] | None = None


class Arguments(argparse.ArgumentParser):
    """Reads the words behind `python -m jaxrl_post NAME`.

    Args:
      name: of the command, which begins its sentences; empty for a run and a simulation.
      text: its help: the forms of use, an empty line, and what it does.
      flags: its arguments.
      instead: returns what to write instead of an unknown argument, or an empty text.
    """

    def __init__(
        self, name: str, text: str, flags: Sequence[Flag], instead: Callable[[str], str] = lambda argument: ""
    ):
        usage, _, about = text.strip().partition("\n\n")
        super().__init__(
            usage=usage,
            description=about,
            allow_abbrev=False,
            add_help=False,
            formatter_class=functools.partial(argparse.RawDescriptionHelpFormatter, max_help_position=32, width=120),
        )
        self.forms = {"--help": "--help"}  # of each flag
        self.seen: dict[str, Any] = {}  # the value of each flag that was read
        self._filled: set[str] = set()  # flags whose value may not be empty
        self.prefix, self._instead = f"{name}: " if name else "", instead
        self._use = " ".join(usage.replace("\npython", " or python").split())
        self.add_argument("-h", "--help", action="help", help="prints this")
        for flag in flags:
            self._add(flag)

    def _add(self, flag: Flag) -> None:
        form, several, _ = flag.form.partition(" ...")
        name, _, value = form.replace("[=", "=").partition("=")
        more: dict[str, Any] = {"help": flag.text.replace("%", "%%")}
        if not name.startswith("--"):
            nargs = "+" if several else "?" if name.startswith("[") else None
            self.add_argument(name.strip("[]").lower(), metavar=name, nargs=nargs, **more)
            return
        self.forms[name] = form
        self._filled |= {name} if flag.default == "" else set()
        if not value:
            self.add_argument(name, action="store_true", **more)
            return
        value = value.removesuffix("]") if "[=" in form else value
        more |= {"metavar": value, "type": flag.type, "default": flag.default}
        if several:
            more |= {"action": "append", "default": []}
        elif "[=" in form:
            more |= {"action": _Once, "nargs": "?", "const": "", "default": None}
        else:
            more |= {"action": _Once, "choices": flag.choices, "required": flag.required}
        self.add_argument(name, **more)

    def read(self, arguments: Sequence[str]) -> argparse.Namespace:
        """Returns the flags by name, with `overrides` as `a.b=value`. Prints the help and exits with 0 where asked to.

        Raises:
          ValueError: an unknown or missing argument, a flag that is given twice, or a value of another kind.
        """
        self.seen.clear()
        own, overrides = split(arguments) if OVERRIDE in self.forms.values() else (list(arguments), ())
        named = [word for word in own if word.startswith("--")]
        empty = {f"{name}=" for name in self._filled}
        self._refuse(
            [word for word in named if word.partition("=")[0] not in self._option_string_actions or word in empty]
        )
        flags, others = self.parse_known_args(own)
        self._refuse(others)
        flags.overrides = overrides
        return flags

    def _refuse(self, unknown: Sequence[str]) -> None:
        """Raises a ValueError about the first word, with the nearest flag. Without a word it does nothing."""
        if unknown:
            name = unknown[0].partition("=")[0]
            near = difflib.get_close_matches(name[:100], self.forms, n=1, cutoff=0.0)[0]
            there = f"nearest is {self.forms[near]}"
            if name not in self.forms:
                there = self._instead(unknown[0]) or f"{there}, all are {', '.join(self.forms.values())}"
            raise ValueError(f"{self.prefix}unknown argument {shown(unknown[0])}; {there}")

    def error(self, message: str):
        """Raises a ValueError instead of ending the process. A flag without its value is told the form that it has."""
        self._refuse(re.findall(r"^argument (--\S+): expected one argument", message))
        raise ValueError(f"{self.prefix}{' '.join(message.split())}; write {self._use}")


class _Once(argparse.Action):
    """Keeps the value of a flag, which is given once."""

    def __call__(self, parser, namespace, values, option_string=None):
        if self.dest in parser.seen:
            both = f"{shown(parser.seen[self.dest])} and {shown(values)}"
            raise ValueError(f"{parser.prefix}{option_string} is given twice, with {both}: leave one of them out")
        parser.seen[self.dest] = values
        setattr(namespace, self.dest, values)


def split(arguments: Sequence[str]) -> tuple[list[str], tuple[str, ...]]:
    """Returns a command line without its overrides, and the overrides as `a.b=value`."""
    others, found, rest = [], [], list(arguments)
    while rest:
        argument = rest.pop(0)
        if argument.startswith(_OVERRIDES):
            apart = "=" not in argument and rest and not rest[0].startswith("--")
            found.append((f"{argument}={rest.pop(0)}" if apart else argument).removeprefix(_OVERRIDES))
        else:
            others.append(argument)
    return others, tuple(found)


# ---- readers of a value, for a flag's `type`


def whole(least: int) -> Callable[[str], int]:
    """Returns a reader of whole numbers from `least` on."""

    def read(text: str) -> int:
        if not re.fullmatch(r"-?\d{1,18}", text) or int(text) < least:
            raise argparse.ArgumentTypeError(f"{shown(text)} must be a whole number of at least {least}")
        return int(text)

    return read


def number(text: str) -> float:
    """Reads a finite number."""
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not math.isfinite(value):
        raise argparse.ArgumentTypeError(f"{shown(text)} must be a finite number")
    return value


def span(text: str) -> tuple[int, int]:
    """Reads A or A:B, a span of steps with both ends."""
    found = re.fullmatch(r"(\d{1,18})(?::(\d{1,18}))?", text)
    if found is None:
        raise argparse.ArgumentTypeError(f"{shown(text)} must be a step A or steps A:B, such as 10:20")
    first, last = int(found[1]), int(found[2] or found[1])
    if last < first:
        raise argparse.ArgumentTypeError(
            f"{shown(text)} ends before it begins; the nearest valid value is {last}:{first}"
        )
    return first, last
