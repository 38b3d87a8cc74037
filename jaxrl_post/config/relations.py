"""What must hold between options: two generic rules. The entries of the second one are in rules.py.

The first rule refuses what would be ignored: an option whose condition `used_when` does not hold must have its default.
The second one refuses options that contradict each other. Both give one sentence with names, values and what to do.
Options are named by section and name, so nothing here knows a schema: the simulator uses the same entries.

Most entries of the second rule are rows of a table, from what must hold to the sentence. What must hold is one line. A
condition (fields.py) and an arrow may stand in front of it. The nearest valid value follows from the line. Three examples:

| line | what must hold |
|---|---|
| `scheduler.name=pipeline -> scheduler.lend is 0` | the option has this value, where the condition holds |
| `sampling.max_tokens < engine.max_length` | the option is below another one or a number; also <= and >= |
| `batch.rows multiple_of mesh.shards` | another option divides it, or is 0 |
"""

from __future__ import annotations

import ast
import operator
import re
import shlex
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from jaxrl_post.config import fields
from jaxrl_post.ring.json_text import shown

_ROW = re.compile(r"(?:(.*) -> )?(\S+) (is|<=|<|>=|multiple_of) (\S+)")
_PLACE = re.compile(r"\{([!#]?)([\w.]+)\}")


@dataclass(frozen=True, kw_only=True)
class Relation:
    """One rule between options.

    `need` gets the values of `names`, options or derived values, in order. Where `when` holds and `need` does not, the
    config is refused with `says`. In it `{name}` stands for name and value, `{!name}` for the value, `{#name}` for
    the number of entries, and `{culprit}` for what `culprit` finds. `nearest` computes the nearest valid value of the first name.
    """

    names: tuple[str, ...]
    need: Callable[..., bool]
    says: str
    when: fields.Condition
    nearest: Callable[..., Any] | None = None
    culprit: Callable[..., Any] | None = None


def relation(*names: str, need: Callable[..., bool], says: str, when: str = "", **more: Any) -> Relation:
    """Declares a relation."""
    return Relation(names=names, need=need, says=says, when=fields.parse(when), **more)


def rows(table: Mapping[str, str]) -> tuple[Relation, ...]:
    """Declares the relations of a table: what must hold, in the language above, and the sentence.

    Raises:
      ValueError: a line that is not of the language.
    """
    return tuple(_row(text, says) for text, says in table.items())


def _row(text: str, says: str) -> Relation:
    found = _ROW.fullmatch(text)
    if found is None:
        raise ValueError(f"relation: {text!r} must be NAME is VALUE, or NAME <=, <, >= or multiple_of NAME")
    when, name, rule, other = found.groups(default="")
    holds, nearest = _RULES[rule]
    bound = _literal(other)
    if isinstance(bound, str) and rule != "is":
        return relation(name, other, need=holds, says=says, when=when, nearest=nearest)
    return relation(
        name, need=lambda value: holds(value, bound), says=says, when=when, nearest=lambda value: nearest(value, bound)
    )


def _literal(text: str) -> Any:
    """Returns a number, a truth value or a tuple as Python writes it; else the text itself."""
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError):
        return text


def multiple_above(number: int, step: int) -> int:
    """Returns the smallest multiple of `step` that is not below `number`."""
    return -(-number // step) * step


# Rule -> whether it holds of a value and a bound, and the nearest value of which it does.
_RULES: dict[str, tuple[Callable[[Any, Any], bool], Callable[[Any, Any], Any]]] = {
    "is": (operator.eq, lambda value, bound: bound),
    "<=": (operator.le, lambda value, bound: bound),
    ">=": (operator.ge, lambda value, bound: bound),
    "<": (operator.lt, lambda value, bound: bound - 1),
    "multiple_of": (lambda value, step: step == 0 or value % step == 0, multiple_above),
}


class Names:
    """Values and names of the options of one config. `aliases`: what a schema calls an option that a rule names."""

    def __init__(self, config: Any, aliases: Mapping[str, str]):
        self._config, self._aliases = config, aliases

    def shown(self, name: str) -> str:
        """Returns the name of an option in this schema."""
        return self._aliases.get(name, name)

    def value(self, name: str) -> Any:
        """Returns the value of an option, or a derived value."""
        return operator.attrgetter(self.shown(name))(self._config)

    def fact(self, name: str) -> str:
        """Returns name and value, as a user writes them."""
        return f"{self.shown(name)}={shown(self.value(name))}"

    def filled(self, text: str) -> str:
        """Returns the text with every `{name}` replaced."""
        kinds = {"": self.fact, "!": lambda name: repr(self.value(name)), "#": lambda name: str(len(self.value(name)))}
        return _PLACE.sub(lambda found: kinds[found[1]](found[2]), text)


def check(config: Any, relations: Iterable[Relation], aliases: Mapping[str, str] | None = None) -> None:
    """Checks a config, a frozen dataclass of sections.

    Raises:
      ValueError: a relation does not hold, or an option that would be ignored is set.
    """
    names = Names(config, aliases or {})
    for one in relations:
        values = tuple(map(names.value, one.names))
        if one.when.holds(names.value) and not one.need(*values):
            raise ValueError(_broken(one, names, values))
    unread = [
        option
        for option in fields.options(type(config))
        if names.value(option.name) != option.default and not option.about.used_when.holds(names.value)
    ]
    if unread:
        raise ValueError(ignored(unread[0], names) + _beside(unread, names))


def ignored(option: fields.Option, names: Names) -> str:
    """Returns the sentence that refuses a value which nothing would read."""
    used = option.about.used_when
    facts = " and ".join(map(names.fact, used.names))
    other = names.shown(used.names[0]) if len(used.names) == 1 else "one of these"
    why = f" ({option.about.why})" if option.about.why else ""
    return (
        f"{names.fact(option.name)} would be ignored: it is read only where {used.words(names.shown)}{why}, and here "
        f"{facts}; leave it at {option.default!r} or change {other}"
    )


def _beside(unread: list[fields.Option], names: Names) -> str:
    """Returns what else would be ignored, and the flags that leave all of it at its default."""
    if len(unread) == 1:
        return ""
    others = ", ".join(names.fact(option.name) for option in unread[1:])
    flags = " ".join(f"--config.{names.shown(option.name)}={_written(option.default)}" for option in unread)
    return f"; so would {others}; to leave all of them at their defaults, add {flags}"


def _written(value: Any) -> str:
    """Returns a value as a shell and the command line take it."""
    return shlex.quote(value if isinstance(value, str) else repr(value))


def _broken(one: Relation, names: Names, values: tuple) -> str:
    text = one.says.replace("{culprit}", repr(one.culprit(*values))) if one.culprit else one.says
    text = names.filled(text)
    if one.nearest is None:
        return text
    nearest = one.nearest(*values)
    return f"{text}; the nearest valid {names.shown(one.names[0])} is {nearest!r}"
