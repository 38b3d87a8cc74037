"""Draws the floors of the house from its imports, into docs/architecture.md between two marks.

    python scripts/floors.py           writes the picture
    python scripts/floors.py --check   exits 1 if the picture in the page is not the present one

A room is a file or folder on the first level of jaxrl_post/, or one of kernels/, configs/ and scripts/. An arrow leads from a
room to one that it imports. The floor of a room is one above the highest room that it imports.

Invariant: the same sources give the same text.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "tests"))

import house  # noqa: E402

PAGE = "docs/architecture.md"
BEGIN, END = "<!-- floors:begin -->", "<!-- floors:end -->"
COMMANDS = "__main__"  # imports the module of a command by its name
OUTSIDE = ("configs", "scripts")  # rooms beside the package
WIDTH = 96

Graph = Mapping[str, set[str]]


def rooms(tree: house.Tree) -> dict[str, set[str]]:
    """Returns each room with the rooms that it imports."""
    graph: dict[str, set[str]] = {tree.room(module): set() for module in tree.modules if tree.room(module)}
    for module in tree.modules:
        if tree.room(module):
            names = {*tree.inner_imports(module), *(_named(tree, module) if tree.room(module) == COMMANDS else ())}
            graph[tree.room(module)] |= {tree.room(name) for name in names}
    for folder in OUTSIDE:
        sources = [source for path, source in tree.sources.items() if path.startswith(f"{folder}/")]
        if sources:
            graph[folder] = {room for source in sources for room in _imported(tree, source)}
    return {room: targets & graph.keys() - {room} for room, targets in sorted(graph.items())}


def _named(tree: house.Tree, module: str) -> Iterator[str]:
    """The modules whose dotted names the module holds as strings, to import one of them when asked."""
    for node in ast.walk(tree.modules[module]):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and node.value in tree.modules:
            yield node.value


def _imported(tree: house.Tree, source: ast.Module) -> set[str]:
    """The rooms that a file outside the package imports."""
    names = set()
    for node in ast.walk(source):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            names |= {f"{node.module}.{alias.name}" for alias in node.names}
    return {tree.room(name) for name in names if name.split(".")[0] == tree.package}


def arrows(graph: Graph) -> int:
    """Counts the pairs of rooms of which one imports the other."""
    return sum(map(len, graph.values()))


def floors(graph: Graph) -> list[list[str]]:
    """Returns the rooms of each floor, the lowest floor first.

    Raises:
      ValueError: rooms import one another in a circle.
    """
    left, out = dict(graph), []
    while left:
        floor = sorted(room for room, targets in left.items() if not targets & left.keys())
        if not floor:
            raise ValueError(f"rooms import one another in a circle: {', '.join(sorted(left))}")
        out.append(floor)
        left = {room: targets for room, targets in left.items() if room not in floor}
    return out


def picture(graph: Graph) -> str:
    """Returns the floors as boxes, the highest first, and below them what each room imports."""
    levels = floors(graph)
    bar = "─" * (WIDTH - 2)
    lines = [f"{len(graph)} rooms on {len(levels)} floors, {arrows(graph)} arrows, all downwards.", "", "```text"]
    lines.append(f"┌{bar}┐")
    for number, floor in reversed(list(enumerate(levels))):
        text = f" {number}   {'   '.join(floor)}"
        lines += [f"│{text.ljust(WIDTH - 2)}│", f"├{bar}┤" if number else f"└{bar}┘"]
    lines += ["```", "", "| floor | room | imports |", "|---|---|---|"]
    for number, floor in reversed(list(enumerate(levels))):
        for room in floor:
            imported = ", ".join(f"`{target}`" for target in sorted(graph[room])) or "nothing"
            lines.append(f"| {number} | `{room}` | {imported} |")
    return "\n".join(lines)


def placed(page: str, text: str) -> str:
    """Returns the page with the text between its marks.

    Raises:
      ValueError: the page lacks a mark.
    """
    for mark in (BEGIN, END):
        if page.count(mark) != 1:
            raise ValueError(f"{PAGE} must hold {mark} once, got {page.count(mark)}")
    before, rest = page.split(BEGIN)
    return f"{before}{BEGIN}\n{text}\n{END}{rest.split(END)[1]}"


def main(arguments: list[str]) -> int:
    """Writes the page, or compares it; returns the exit code."""
    if arguments not in ([], ["--check"]):
        print(f"unknown argument {arguments[0]!r}; there is --check", file=sys.stderr)
        return 2
    file = ROOT / PAGE
    old = file.read_text(encoding="utf-8")
    new = placed(old, picture(rooms(house.Tree(ROOT))))
    if arguments and old != new:
        print(f"{PAGE} shows other floors than the imports have; run python scripts/floors.py", file=sys.stderr)
        return 1
    if not arguments:
        file.write_text(new, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
