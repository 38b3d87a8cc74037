"""The house is lighter: lines and statements beside the base commit's, rooms and arrows, and the limits of its form.

Counts the Python files that git tracks, in the present tree and in that of the base commit (scripts/baseline.py), with the
same rules (tests/weights.py, tests/house.py). Python that moved out of the product counts where it moved to: what other
folders grew by is added to the product. Both trees must be formatted by the same settings, else lines say nothing.
"""

from __future__ import annotations

import ast
import tomllib

import baseline
import floors
import house

MINUTES = 1.0
SOURCES = ("tests/house.py", "tests/weights.py", "jaxrl_post/**/*.py", "kernels/**/*.py", "scripts/**/*.py")
MOST = {  # place -> (lines, statements) as shares of the base's
    "product": (0.79, 0.86),
    "scripts": (0.65, None),
    "tests": (0.82, None),
}
ROOMS, ARROWS = 20, 105


def show(record) -> None:
    import weights

    base, tree = house.Tree(baseline.checkout(record.root)), house.Tree(record.root)
    record.figure("base", baseline.BASE)
    record.figure("formatter_as_the_base's", _formatter(base) == _formatter(tree), equals=True)
    before, after = weights.weigh(base.root), weights.weigh(tree.root)
    moved = [max(0, new - old) for old, new in zip(before["elsewhere"], after["elsewhere"], strict=True)]
    for place, (lines, statements) in MOST.items():
        added = weights.Weight(*moved) if place == "product" else weights.Weight()
        for what, most in (("lines", lines), ("statements", statements)):
            old, new = getattr(before[place], what), getattr(after[place], what) + getattr(added, what)
            record.figure(f"{place}.{what}.base", old)
            record.figure(f"{place}.{what}", new)
            record.figure(f"{place}.{what}.share", round(new / old, 4), at_most=most)
    for name, weight in after.items():
        record.figure(f"weight.{name}", weight._asdict())
    record.figure("lines_with_two_statements", _doubled(tree, weights), equals=[])
    graph = floors.rooms(tree)
    record.figure("rooms", len(graph.keys() - {floors.COMMANDS}), at_most=ROOMS)  # the door is no room
    record.figure("arrows", floors.arrows(graph), at_most=ARROWS)
    record.figure("arrows_upwards", house.upward_imports(tree), equals=[])
    record.figure("circles", house.cycles(tree), equals=[])
    record.figure("long_files", house.long_files(tree), equals={})
    record.figure("long_functions", house.long_functions(tree), equals={})
    record.figure("crowded_folders", weights.crowded_folders(tree), equals={})
    record.figure("wide_signatures", weights.wide_signatures(tree), equals={})
    record.figure("base.lone_helpers", len(weights.lone_helpers(base)))
    record.figure("lone_helpers", len(weights.lone_helpers(tree)))


def _formatter(tree) -> dict:
    """Returns what decides where the formatter breaks a line: its section, the width and the oldest Python."""
    settings = tomllib.loads((tree.root / "pyproject.toml").read_text())["tool"]["ruff"]
    return {name: settings.get(name) for name in ("line-length", "indent-width", "target-version", "format")}


def _doubled(tree, weights) -> list[str]:
    """`path:line` of every line that holds two statements, tests included."""
    tests = {
        path.relative_to(tree.root).as_posix(): ast.parse(path.read_text())
        for path in sorted((tree.root / "tests").rglob("*.py"))
    }
    return [
        f"{path}:{line}" for path, source in {**tree.sources, **tests}.items() for line in weights.double_lines(source)
    ]
