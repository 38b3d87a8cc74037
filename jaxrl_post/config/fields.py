"""How an option is declared in the schema: its default, its range or choices, and what the reader of a config must know.

Every kind of option takes the same words:

- `doc`: what the option does, in one or two sentences.
- `unit`: what its number counts.
- `used_when`: the condition on other options under which anything reads it. Behind ` because ` stands its reason.
- `recorded`: a resumed run has the value of its start where the option is left at its default.
- `accelerator`: the default on a TPU or GPU, where it is another one. A config file that leaves such an option alone has
  AUTO there, and `resolve` makes it definite.

A condition is one line:

  scheduler.name=pipeline                 the option has this value
  scheduler.name=tail_batching|pipeline   it has one of these values
  speculation.drafter!=off                it has none of these values
  eval.prompts>0                          its number is above this one
  data.train=task:*                       its text begins with `task:`
  eval.data=                              it is empty: a text, a list or a mapping
  A and B, A or B                         `and` binds closer than `or`; parentheses do not exist

An option is named by its section and its name. A condition that is not written so is refused when the schema is imported.
"""

from __future__ import annotations

import dataclasses
import datetime
import functools
import re
import typing
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

Lookup = Callable[[str], Any]  # the value of a dotted name
_TERM = re.compile(r"([a-z_][a-z0-9_.]*)(!=|=|>)(\S*)")
_WORDS = {"true": True, "false": False}
AUTO = "auto"


@dataclass(frozen=True)
class Term:
    """One comparison. `values`: the texts that `=` and `!=` compare with; `>` has one number."""

    name: str
    sign: str
    values: tuple[str, ...]

    def holds(self, value: Any) -> bool:
        """Whether an option of this value fulfils the term."""
        if self.sign == ">":
            return value > float(self.values[0])
        return any(_equal(value, text) for text in self.values) == (self.sign == "=")

    def words(self, name: str) -> str:
        """The term as a part of a sentence. `name` stands for the option."""
        texts = [_spelled(text) for text in self.values]
        if self.sign == ">":
            return f"{name} is above {self.values[0]}"
        if self.values[0].endswith("*"):
            return f"{name} {'begins' if self.sign == '=' else 'does not begin'} with {self.values[0][:-1]!r}"
        if self.sign == "=":
            return f"{name} is {' or '.join(texts)}" if len(texts) < 4 else f"{name} is one of {', '.join(texts)}"
        return f"{name} is not {texts[0]}" if len(texts) == 1 else f"{name} is none of {', '.join(texts)}"


@dataclass(frozen=True)
class Condition:
    """Alternatives, each a conjunction of terms. Without an alternative it always holds."""

    text: str = ""
    alternatives: tuple[tuple[Term, ...], ...] = ()

    def holds(self, value: Lookup) -> bool:
        """Whether one of the alternatives holds."""
        return not self.alternatives or any(
            all(term.holds(value(term.name)) for term in terms) for terms in self.alternatives
        )

    def terms(self) -> Iterator[Term]:
        """Yields every term of every alternative."""
        return (term for terms in self.alternatives for term in terms)

    @property
    def names(self) -> tuple[str, ...]:
        """The options that the condition asks about, each once."""
        return tuple(dict.fromkeys(term.name for term in self.terms()))

    def words(self, alias: Callable[[str], str] = lambda name: name) -> str:
        """The condition as a part of a sentence."""
        return ", or ".join(_as_words(terms, alias) for terms in self.alternatives)


def _as_words(terms: tuple[Term, ...], alias: Callable[[str], str]) -> str:
    """Returns a conjunction as words. A name that follows itself is said once."""
    parts = []
    for before, term in zip((None, *terms), terms, strict=False):
        words, name = term.words(alias(term.name)), alias(term.name)
        parts.append(words.removeprefix(f"{name} ") if before and before.name == term.name else words)
    return " and ".join(parts)


def parse(text: str) -> Condition:
    """Returns the condition that a line of the language above stands for.

    Raises:
      ValueError: a term that is not `name=value`, `name!=value` or `name>number`.
    """
    if not text:
        return Condition()
    return Condition(text, tuple(tuple(map(_parsed_term, one.split(" and "))) for one in text.split(" or ")))


def _parsed_term(text: str) -> Term:
    found = _TERM.fullmatch(text.strip())
    if found is None:
        raise ValueError(f"condition: {text!r} must be name=value, name!=value or name>number")
    return Term(found[1], found[2], tuple(found[3].split("|")))


def _equal(value: Any, text: str) -> bool:
    if isinstance(value, bool):
        return value is _WORDS[text]
    if isinstance(value, (int, float)):
        return value == float(text)
    if text == "" or isinstance(value, (tuple, list, Mapping)):
        return text == "" and len(value) == 0
    return value.startswith(text[:-1]) if text.endswith("*") else value == text


def _spelled(text: str) -> str:
    plain = text in _WORDS or re.fullmatch(r"-?[0-9.]+", text)
    return (text if plain else repr(text)) if text else "empty"


def is_date(text: str) -> bool:
    """Returns whether an option is empty, or a date or a time in ISO form."""
    try:
        return not text or bool(datetime.datetime.fromisoformat(text))
    except ValueError:
        return False


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
    used_when: Condition = Condition()
    why: str = ""
    accelerator: Any = None
    recorded: bool = False


def number(default, low=None, high=None, **words):
    """Declares a number with an inclusive range. Without `low` it is at least 0."""
    return _declared(default, low=type(default)(0) if low is None else low, high=high, **words)


def fraction(default, **words):
    """Declares a number from 0 to 1."""
    return number(default, 0.0, 1.0, **words)


def positive(default, **words):
    """Declares a whole number from 1 on."""
    return number(default, 1, **words)


def one_of(choices, *, default="", **words):
    """Declares a text with a closed list of values, divided by `|` as in a condition. The first is the default, unless one is named."""
    values = tuple(choices.split("|"))
    return _declared(default or values[0], choices=values, **words)


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
    return one_of("auto|yes|no", **words)


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
    condition, _, why = used_when.partition(" because ")
    return words | {"used_when": parse(condition), "why": why}


@dataclass(frozen=True, kw_only=True)
class Option:
    """One option of a schema: its full name (`engine.slots`), its type, its default, and what the schema says of it."""

    name: str
    kind: Any
    default: Any
    about: About


@functools.cache
def about(f: dataclasses.Field) -> About:
    """Returns what the schema says of a field."""
    return About(**f.metadata)


@functools.cache
def members(schema: type) -> dict[str, tuple[Any, dataclasses.Field]]:
    """Returns type and field of every member of a dataclass, by name; a member may be a section."""
    hints = typing.get_type_hints(schema)
    return {f.name: (hints[f.name], f) for f in dataclasses.fields(schema)}


@functools.cache
def options(schema: type, where: str = "") -> tuple[Option, ...]:
    """Returns every option of a schema and of its sections, in the order of the schema."""
    out: list[Option] = []
    for name, (kind, f) in members(schema).items():
        full = f"{where}.{name}" if where else name
        if dataclasses.is_dataclass(kind):
            out += options(kind, full)
        else:
            default = {} if f.default is dataclasses.MISSING else f.default
            out.append(Option(name=full, kind=kind, default=default, about=about(f)))
    return tuple(out)
