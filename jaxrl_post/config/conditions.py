"""When an option is read: a condition on other options, written in one line.

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

import datetime
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

Lookup = Callable[[str], Any]  # the value of a dotted name
_TERM = re.compile(r"([a-z_][a-z0-9_.]*)(!=|=|>)(\S*)")
_WORDS = {"true": True, "false": False}


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
        return ", or ".join(_told(terms, alias) for terms in self.alternatives)


def _told(terms: tuple[Term, ...], alias: Callable[[str], str]) -> str:
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
    return Condition(text, tuple(tuple(map(_term, one.split(" and "))) for one in text.split(" or ")))


def _term(text: str) -> Term:
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
