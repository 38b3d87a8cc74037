"""A fault, and how it is planted: a run of Python tokens in one file is replaced by other text.

Invariant: a fault is planted where its tokens are found exactly once, or not at all. White space, line breaks, comments,
quote style and trailing commas do not count, so a reformatted or moved function still matches; other code does not.
"""

from __future__ import annotations

import ast
import dataclasses
import functools
import io
import re
import token
import tokenize
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

_SILENT = {token.NEWLINE, token.INDENT, token.DEDENT, token.ENDMARKER, tokenize.NL, tokenize.COMMENT, tokenize.ENCODING}
_CLOSING = (")", "]", "}")
_HEAD = re.compile(r"(?P<name>\w+)(?: in (?P<where>[\w.]+))?: (?P<why>.+?)(?: \[(?P<tests>test_.+)\])?")
_PAIR = re.compile(r"  (?P<before>.+?) =>(?: (?P<after>.+))?")
_PART = re.compile(r"  (?P<sign>[-+])(?: (?P<text>.*))?")


class Mismatch(Exception):
    """A fault cannot be planted; the message says which, and why."""


@dataclass(frozen=True, kw_only=True)
class Fault:
    """One mistake to plant.

    Attributes:
      id: the file's name, a dot, and a name of its own.
      file: path in the checkout.
      where: a function or class as `name` or `Class.method`; empty for the whole file.
      before, after: what stands there, and what is planted. `before` has balanced brackets. Lines of `after` behind the
        first are indented like the line that is changed.
      why: what the mistake is.
      tests: functions (`test_x`, or `file.py::test_x` where several have that name) or files of tests/; one must fail.
    """

    id: str
    file: str
    where: str
    why: str
    before: str = ""
    after: str = ""
    tests: tuple[str, ...] = ()

    @property
    def room(self) -> str:
        """The folder or file below the package in which it lies."""
        first, *others = Path(self.file).parts
        return first if first == "kernels" else Path(others[0]).stem


def read(path: Path) -> list[Fault]:
    """The faults of a list. Below the line `= FILE` of a file in the checkout come its faults, each as

        NAME in WHERE: WHY [TEST]
          BEFORE => AFTER

    `in WHERE` may be left out, and the tests where they are those of the fault above it in the file. Several tests may stand
    in the brackets, with spaces between them. A BEFORE or AFTER that is long or has several lines stands below the head as

          - BEFORE
          + AFTER

    Raises:
      ValueError: a line is none of these.
    """
    faults: list[Fault] = []
    file, tests = "", ()
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1):
        if line.startswith("= "):
            file, tests = line.removeprefix("= "), ()
        elif head := _HEAD.fullmatch(line):
            tests = tuple((head["tests"] or "").split()) or tests
            id = f"{Path(file).stem}.{head['name']}"
            faults.append(Fault(id=id, file=file, where=head["where"] or "", why=head["why"], tests=tests))
        elif faults and (part := _PART.fullmatch(line)):
            name = {"-": "before", "+": "after"}[part["sign"]]
            lines, text = getattr(faults[-1], name), part["text"] or ""
            faults[-1] = dataclasses.replace(faults[-1], **{name: f"{lines}\n{text}" if lines else text})
        elif faults and (pair := _PAIR.fullmatch(line)):
            faults[-1] = dataclasses.replace(faults[-1], before=pair["before"], after=pair["after"] or "")
        elif line and number > 1:  # the first line says what the list is of
            raise ValueError(f"{path}, line {number}: is no part of a fault: {line!r}")
    return faults


class Token(NamedTuple):
    """`text`: normalised. `start`, `end`: (line from 1, column) in the source."""

    text: str
    start: tuple[int, int]
    end: tuple[int, int]


@functools.cache
def tokens(source: str) -> tuple[Token, ...]:
    """What counts of a source."""
    found = [
        Token(_normal(kind, text), start, end)
        for kind, text, start, end, _ in tokenize.generate_tokens(io.StringIO(source).readline)
        if kind not in _SILENT
    ]
    behind = [*found[1:], Token("", (0, 0), (0, 0))]
    return tuple(one for one, after in zip(found, behind) if not (one.text == "," and after.text in _CLOSING))


def _normal(kind: int, text: str) -> str:
    """One spelling of a string, whichever quotes it has."""
    name = token.tok_name[kind]
    if name in ("FSTRING_START", "FSTRING_END"):
        return name + re.sub("[\"']+", "", text).lower()
    if name != "STRING":
        return text
    prefix = re.match("[a-zA-Z]*", text)[0].lower()
    return f"{prefix} {text.strip(prefix).strip(chr(34) + chr(39))}" if "f" in prefix else repr(ast.literal_eval(text))


def fragment(code: str) -> list[str]:
    """The tokens of a piece of code. In brackets, so that its lines may begin anywhere.

    Raises:
      Mismatch: its own brackets do not match.
    """
    try:
        return [one.text for one in tokens(f"(\n{code}\n)")][1:-1]
    except tokenize.TokenError as error:
        raise Mismatch(f"{code!r} is no piece of Python with balanced brackets: {error}") from error


def planted(source: str, fault: Fault) -> str:
    """The source with the fault in it.

    Raises:
      Mismatch: as `place`, or what comes out is no Python.
    """
    begin, end = place(source, fault)
    lines = source.splitlines(keepends=True)
    indent = re.match(r"\s*", lines[begin[0] - 1])[0]
    text = f"\n{indent}".join(fault.after.split("\n"))
    head, tail = "".join(lines[: begin[0] - 1]), "".join(lines[end[0] :])
    out = head + lines[begin[0] - 1][: begin[1]] + text + lines[end[0] - 1][end[1] :] + tail
    try:
        ast.parse(out)
    except SyntaxError as error:
        raise Mismatch(f"{fault.id}: with it {fault.file} is no Python: {error}") from error
    return out


def place(source: str, fault: Fault) -> tuple[tuple[int, int], tuple[int, int]]:
    """Begin and end, each (line from 1, column), of what the fault replaces.

    Raises:
      Mismatch: `before` is not there exactly once, `where` is not there, or `after` is the same.
    """
    first, last = _span(source, fault)
    have, want = tokens(source), fragment(fault.before)
    inside = [i for i, one in enumerate(have) if first <= one.start[0] <= last and one.text == want[0]]
    found = [i for i in inside if [one.text for one in have[i : i + len(want)]] == want]
    if len(found) != 1:
        scope = f"{fault.where} of {fault.file}" if fault.where else fault.file
        raise Mismatch(f"{fault.id}: {fault.before!r} occurs {len(found)} times in {scope}, it must occur once")
    if [line.split() for line in fault.before.splitlines()] == [line.split() for line in fault.after.splitlines()]:
        raise Mismatch(f"{fault.id}: it changes nothing")
    return have[found[0]].start, have[found[0] + len(want) - 1].end


def _span(source: str, fault: Fault) -> tuple[int, int]:
    """First and last line of `where`."""
    if not fault.where:
        return 1, source.count("\n") + 1
    nodes = [_parsed(source)]
    for name in fault.where.split("."):
        nodes = [
            child
            for node in nodes
            for child in node.body
            if isinstance(child, (ast.FunctionDef, ast.ClassDef)) and child.name == name
        ]
    if len(nodes) != 1:
        raise Mismatch(f"{fault.id}: {fault.file} has {len(nodes)} times a function or class {fault.where!r}")
    return nodes[0].lineno, nodes[0].end_lineno


_parsed = functools.lru_cache(maxsize=None)(ast.parse)


def plant(root: Path, fault: Fault) -> str:
    """The planted source of the fault's file below `root`.

    Raises:
      Mismatch: as `planted`; where the file or its function is gone it names the files that hold such tokens.
    """
    path = root / fault.file
    try:
        if not path.is_file():
            raise Mismatch(f"{fault.id}: there is no file {fault.file}")
        return planted(path.read_text(encoding="utf-8"), fault)
    except Mismatch as mismatch:
        others = [
            other.relative_to(root).as_posix()
            for folder in ("jaxrl_post", "kernels")
            for other in sorted((root / folder).rglob("*.py"))
            if other != path and _holds(other, fault)
        ]
        raise Mismatch(f"{mismatch}; its tokens are in {', '.join(others) or 'no other file'}") from mismatch


def _holds(path: Path, fault: Fault) -> bool:
    try:
        have, want = ([one.text for one in tokens(path.read_text(encoding="utf-8"))], fragment(fault.before))
    except Mismatch:
        return False
    return any(have[i : i + len(want)] == want for i in range(len(have) - len(want) + 1))
