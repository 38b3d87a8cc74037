"""The house is small: rooms, arrows and floors of the import graph, sizes of files and functions, beside the base commit's.

The figures are read from the sources, with the rules of tests/house.py and the graph of scripts/floors.py. Those of the base
commit (scripts/baseline.py) have no bounds. A file or function over its limit needs a reason in tests/test_house.py.
"""

from __future__ import annotations

import ast
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

MINUTES = 0.5
SOURCES = (
    "tests/house.py",
    "tests/contracts.py",
    "tests/test_house.py",
    "jaxrl_post/**/*.py",
    "kernels/**/*.py",
    "configs/**/*.py",
    "scripts/**/*.py",
)
EXCEPTIONS = 10  # files and functions over their limits, together
LONGEST = 60  # lines of any function
LEAVES = (
    "import json, sys; sys.path[:0] = ['.', sys.argv[1]]; import contracts; from jaxrl_post.config import Config; "
    "print(json.dumps(contracts.leaves(Config)))"
)


def show(record) -> None:
    sys.path[:0] = [str(record.root), str(record.root / "tests"), str(record.root / "scripts")]
    import baseline
    import house

    record.figure("base", baseline.BASE)
    trees = {"base": house.Tree(baseline.checkout(record.root)), "new": house.Tree(record.root)}
    figures = {which: _figures(tree, record.root / "tests") for which, tree in trees.items()}
    bounds: dict[str, dict[str, Any]] = {
        "rooms": {"at_most": 26},
        "arrows": {"at_most": 100},
        "cycles": {"equals": 0},
        "modules_on_the_first_level": {"at_most": house.FIRST_LEVEL},
        "longest_function_lines": {"at_most": LONGEST},
        "getattr_proxies": {"equals": 0},
        "options_that_nothing_reads": {"equals": 0},
    }
    for name, value in figures["new"].items():
        record.figure(f"base.{name}", figures["base"][name])
        record.figure(f"new.{name}", value, **bounds.get(name, {}))
    record.figure("new.arrows_upwards", len(house.upward_imports(trees["new"])), equals=0)
    long = {**house.long_files(trees["new"]), **house.long_functions(trees["new"])}
    reasons = _reasons(record.root / "tests" / "test_house.py")
    record.figure("new.exceptions", dict(sorted(long.items())))
    record.figure("new.num_exceptions", len(long), at_most=EXCEPTIONS)
    record.figure("new.exceptions_without_a_reason", house.unsettled(long, reasons), equals=[])


def _figures(tree, tests: Path) -> dict[str, Any]:
    """What is counted of one tree."""
    import contracts
    import floors
    import house

    graph = floors.rooms(tree)
    lines = house.long_files(tree, limit=0)
    functions = house.long_functions(tree, limit=0)
    unread = contracts.unread(tree, _leaves(tree.root, tests))
    return {
        "rooms": len(graph),
        "arrows": floors.arrows(graph),
        "floors": len(floors.floors(graph)),
        "cycles": len(house.cycles(tree)),
        "modules_on_the_first_level": len(list((tree.root / tree.package).glob("*.py"))),
        "largest_file_lines": max(lines.values()),
        "largest_file": max(lines, key=lambda path: lines[path]),
        "longest_function_lines": max(functions.values()),
        "longest_function": max(functions, key=lambda name: functions[name]),
        f"files_over_{house.FILE_LINES}": len(house.long_files(tree)),
        f"functions_over_{house.FUNCTION_LINES}": len(house.long_functions(tree)),
        "getattr_proxies": len(proxies(tree)),
        "options_that_nothing_reads": len(unread),
    }


def proxies(tree) -> list[str]:
    """Returns the classes of the package that pass unknown names on to another object, by `__getattr__`."""
    return [
        f"{module}.{node.name}"
        for module, source in tree.modules.items()
        for node in ast.walk(source)
        if isinstance(node, ast.ClassDef) and "__getattr__" in {getattr(inner, "name", "") for inner in node.body}
    ]


def _leaves(root: Path, tests: Path) -> list[str]:
    """The options of a tree, read by a process that imports its package."""
    command = [sys.executable, "-c", LEAVES, str(tests)]
    done = subprocess.run(command, cwd=root, text=True, capture_output=True, timeout=300)
    if done.returncode:
        raise RuntimeError(f"the options of {root} could not be read:\n{done.stderr[-2000:]}")
    return json.loads(done.stdout)


def _reasons(file: Path) -> dict[str, str]:
    """The tables of files and functions that may be longer, with their reasons."""
    found: dict[str, str] = {}
    for node in ast.parse(file.read_text()).body:
        if isinstance(node, ast.AnnAssign) and ast.unparse(node.target) in ("LONG_FILES", "LONG_FUNCTIONS"):
            found |= ast.literal_eval(node.value)
    return found
