"""The options as text, from the schema alone: for the terminal, and as the page docs/options.md.

  python -m jaxrl_post.config.reference > docs/options.md
  python -m jaxrl_post.config.reference coming_from > docs/coming_from.md

Every option has its type, its default, its range or choices, its unit, what it does, and the condition under which it is
read. The page also names the modules that read it.
"""

from __future__ import annotations

import difflib
import functools
import sys
import textwrap
import typing
from collections.abc import Sequence

from jaxrl_post.config import elsewhere, fields
from jaxrl_post.config.schema import Config
from jaxrl_post.ring.json_text import said, shown

RUN = "run"  # what the options without a section are listed under
_WIDTH = 100
_HELP = ("--help", "-h")


def sections(schema: type = Config) -> dict[str, tuple[str, list[fields.Option]]]:
    """Returns first words and options of every section, by its name, in the order of the schema."""
    found: dict[str, list[fields.Option]] = {RUN: []}
    for option in fields.options(schema):
        found.setdefault(option.name.partition(".")[0] if "." in option.name else RUN, []).append(option)
    kinds = {RUN: schema, **{name: kind for name, (kind, _) in fields.members(schema).items()}}
    return {name: (str(kinds[name].__doc__), options) for name, options in found.items()}


def help_on(arguments: Sequence[str], usage: str, schema: type = Config) -> str:
    """Returns the text for a command line with `--help` or `--help SECTION` in it. `usage` is the command's own.

    Raises:
      ValueError: there is no such section; with the nearest one.
    """
    known = sections(schema)
    asked = _asked(arguments).removeprefix("--config.")
    if not asked:
        width = max(map(len, known))
        lines = (f"  {name:<{width}}  {_first(doc)}" for name, (doc, _) in known.items())
        return "\n".join([usage.strip(), "", "Sections of options; --help SECTION prints one:", *lines])
    alone = {option.name for option in known[RUN][1]}
    section = RUN if asked in alone else asked.partition(".")[0]
    if section not in known:
        near = difflib.get_close_matches(section, known, n=1, cutoff=0.0)
        other = elsewhere.answer(asked) if schema is Config else ""
        raise ValueError(
            f"--help {said(asked)}: no such section; {f'{other}; ' * bool(other)}nearest is {near[0]!r}, all are {', '.join(known)}"
        )
    doc, options = known[section]
    return "\n\n".join([f"{section}: {_flowing(doc)}", *map(_entry, options)])


def changed(config: Config) -> str:
    """Returns the options of a config that differ from their defaults, a line for each, and where the others are told.

    An option that follows the platform has the default auto, and stands here with the value that it took."""
    found = {}
    for option in fields.options(Config):
        value = functools.reduce(getattr, option.name.split("."), config)
        if value != option.default:
            found[option.name] = (shown(value), shown(option.default))
    wide, wider = (
        max((len(text) for text in texts), default=0) for texts in (found, [one for one, _ in found.values()])
    )
    lines = [f"  {name:<{wide}}  {value:<{wider}}  (default {default})" for name, (value, default) in found.items()]
    head = f"{len(found)} options differ from their defaults; --dry-run=all prints every option, and RUN/config.json keeps them"
    return "\n".join([head, *lines])


def asks(arguments: Sequence[str]) -> bool:
    """Returns whether a command line asks for help."""
    return any(argument.partition("=")[0] in _HELP for argument in arguments)


def _asked(arguments: Sequence[str]) -> str:
    """Returns the section behind `--help`, or the only other argument; empty where the command itself is asked about."""
    for at, argument in enumerate(arguments):
        name, equals, value = argument.partition("=")
        after = arguments[at + 1] if at + 1 < len(arguments) else "-"
        if name in _HELP and (equals or not after.startswith("-")):
            return value if equals else after
    words = [argument for argument in arguments if argument not in _HELP]
    return words[0] if len(words) == 1 and not words[0].startswith("--config=") else ""


def page(schema: type = Config) -> str:
    """Returns docs/options.md."""
    out = [
        "# Options",
        "Written by `python -m jaxrl_post.config.reference > docs/options.md`; do not edit. A file in configs/ assigns "
        "`c.scheduler.lane = 0.5`, the command line overrides it with `--config.scheduler.lane=0.5`, and "
        "`--config.scheduler=default` gives a whole section its defaults. An option that is set where its condition does not "
        "hold is refused: nothing would read it. `python -m jaxrl_post.main --help SECTION` prints a section, and "
        "`python -m jaxrl_post.main --help` the flags beside the options.",
    ]
    for name, (doc, options) in sections(schema).items():
        out.append(f"## {name}\n\n{_flowing(doc)}")
        rows = ["| option | type | default | allowed | unit | meaning |", "|---|---|---|---|---|---|"]
        rows += [_row(option) for option in options]
        out.append("\n".join(rows))
    return "\n\n".join(out) + "\n"


def _row(option: fields.Option) -> str:
    about = option.about
    meaning = about.doc + (f" Read only where {about.used_when.words()}." if about.used_when.text else "")
    cells = (f"`{option.name}`", kind(option), _default(option), allowed(option), about.unit, meaning)
    return "| " + " | ".join(cells).replace("  ", " ") + " |"


def coming_from(schema: type = Config) -> str:
    """Returns docs/coming_from.md."""
    return elsewhere.page({option.name: _default(option) for option in fields.options(schema)})


def _default(option: fields.Option) -> str:
    other = option.about.accelerator
    return f"`{option.default!r}`" + ("" if other is None else f", on an accelerator `{other!r}`")


def _entry(option: fields.Option) -> str:
    """Returns an option as a few lines of the terminal."""
    about = option.about
    other = "" if about.accelerator is None else f"on an accelerator {about.accelerator!r}"
    facts = [f"{option.name} = {option.default!r}", other, kind(option), allowed(option), about.unit]
    told = textwrap.wrap("; ".join(filter(None, facts)), 180, initial_indent="  ", subsequent_indent="      ")
    lines = [*told, *_wrapped(about.doc)]
    if about.used_when.text:
        lines += _wrapped(f"Read only where {about.used_when.words()}.")
    return "\n".join(lines)


def kind(option: fields.Option) -> str:
    """Returns the type of an option in words."""
    origin = typing.get_origin(option.kind)
    if origin is tuple:
        return f"list of {typing.get_args(option.kind)[0].__name__}"
    return "mapping" if origin is not None else option.kind.__name__


def allowed(option: fields.Option) -> str:
    """Returns the choices or the range of an option in words; nothing where any value of the type will do."""
    about = option.about
    if about.choices:
        return ", ".join(about.choices)
    if about.low is None:
        return ""
    return f"at least {about.low}" if about.high is None else f"{about.low} to {about.high}"


def _wrapped(text: str) -> list[str]:
    return textwrap.wrap(text, _WIDTH, initial_indent="    ", subsequent_indent="    ")


def _first(doc: str) -> str:
    return " ".join(doc.split()).partition(". ")[0].rstrip(".") + "."


def _flowing(doc: str) -> str:
    return textwrap.dedent(f"    {doc}").strip()


if __name__ == "__main__":
    sys.stdout.write(coming_from() if sys.argv[1:] == ["coming_from"] else page())
