"""What a tree weighs: lines and statements by folder, and what its form costs a reader. Nothing here imports the project.

A statement is a node of ast.stmt that is no docstring. Lines are those of files that git tracks: Python, and the tables,
templates and C sources that Python may be moved into.
"""

from __future__ import annotations

import ast
import subprocess
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import house

PLACES = {"product": ("jaxrl_post", "kernels"), "scripts": ("scripts",), "tests": ("tests",)}  # the rest is "elsewhere"
WEIGHED = ("*.py", "*.txt", "*.c", "*.j2")
FOLDER_FILES = 25  # Python files in one folder of the product
PARAMETERS = 12  # of a public function
FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
BODIES = ("body", "orelse", "finalbody", "handlers", "cases")


class Weight(NamedTuple):
    """Of some files."""

    files: int = 0
    lines: int = 0
    statements: int = 0


def weigh(root: Path) -> dict[str, Weight]:
    """Returns the weight of each place, and of each room of the package as `room.NAME`."""
    done = subprocess.run(["git", "ls-files", "-z", *WEIGHED], cwd=root, text=True, capture_output=True, check=True)
    out: dict[str, Weight] = {}
    for path in filter(None, done.stdout.split("\0")):
        text = (root / path).read_text()
        count = statements(ast.parse(text, path)) if path.endswith(".py") else 0
        own = Weight(1, len(text.splitlines()), count)
        parts = Path(path).parts
        place = next((name for name, folders in PLACES.items() if parts[0] in folders), "elsewhere")
        names = [place]
        if place == "product":
            names.append(f"room.{Path(parts[1]).stem if parts[0] != 'kernels' else 'kernels'}")
        for name in names:
            out[name] = Weight(*map(sum, zip(out.get(name, Weight()), own, strict=True)))
    return dict(sorted(out.items()))


def statements(source: ast.Module) -> int:
    """The number of statements, docstrings left out."""
    kinds = (ast.Module, ast.ClassDef, *FUNCTIONS)
    docstrings = sum(
        isinstance(node, kinds) and ast.get_docstring(node, clean=False) is not None for node in ast.walk(source)
    )
    return sum(isinstance(node, ast.stmt) for node in ast.walk(source)) - docstrings


def double_lines(source: ast.Module) -> list[int]:
    """Line numbers on which a second statement begins: `a; b`, `if a: b`."""
    out = []
    for node in ast.walk(source):
        members = [member for name in BODIES for member in _members(node, name)]
        starts = [member.lineno for member in members]
        if isinstance(node, (ast.stmt, ast.ExceptHandler)) and not _stub(members):
            starts.append(node.lineno)
        out += [line for line, count in Counter(starts).items() if count > 1]
    return sorted(out)


def _members(node: ast.AST, name: str) -> list:
    found = getattr(node, name, None)
    return [member for member in found if hasattr(member, "lineno")] if isinstance(found, list) else []


def _stub(members: list[ast.stmt]) -> bool:
    """Whether a body is `...` alone, which stands beside its header."""
    return len(members) == 1 and isinstance(members[0], ast.Expr) and ast.unparse(members[0]) == "..."


def crowded_folders(tree: house.Tree, limit: int = FOLDER_FILES) -> dict[str, int]:
    """Folder of the product -> its Python files, where those are more than the limit."""
    product = (path for path in tree.sources if path.split("/")[0] in PLACES["product"])
    counts = Counter(str(Path(path).parent) for path in product)
    return {folder: count for folder, count in sorted(counts.items()) if count > limit}


def wide_signatures(tree: house.Tree, limit: int = PARAMETERS) -> dict[str, int]:
    """`module:name` -> parameters, of public functions and constructors of the product that take more than the limit."""
    return {
        f"{module}:{name}": count
        for module, source in tree.modules.items()
        for name, node in functions(source)
        if not any(part.startswith("_") and part != "__init__" for part in name.split("."))
        and (count := _parameters(node, name)) > limit
    }


def _parameters(node: ast.FunctionDef, name: str) -> int:
    """Without `self` and `cls`."""
    named = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]
    return len(named) - ("." in name and bool(named) and named[0].arg in ("self", "cls"))


def lone_helpers(tree: house.Tree, limit: int = house.FUNCTION_LINES) -> dict[str, str]:
    """`module:name` of a private function -> the only function that names it, where both would fit into one function.

    Decorated functions and those that other modules name are left out.
    """
    everywhere = Counter(name for source in tree.modules.values() for name in _named(source))
    out = {}
    for module, source in tree.modules.items():
        known = dict(functions(source))
        says = {name: set(_named(node)) for name, node in known.items()}
        for name, node in known.items():
            own = name.rpartition(".")[2]
            if not own.startswith("_") or own.startswith("__") or node.decorator_list or everywhere[own] != 1:
                continue
            callers = [other for other, at in known.items() if at is not node and own in says[other]]
            inner = callers[-1] if callers else None
            if inner and sum(at.end_lineno - at.lineno + 1 for at in (node, known[inner])) <= limit:
                out[f"{module}:{name}"] = inner
    return out


def _named(node: ast.AST) -> list[str]:
    """Every name and attribute that the code below the node spells."""
    walked = ast.walk(node)
    return [
        one.id if isinstance(one, ast.Name) else one.attr
        for one in walked
        if isinstance(one, (ast.Name, ast.Attribute))
    ]


def functions(node: ast.AST, prefix: str = "") -> Iterator[tuple[str, ast.FunctionDef]]:
    """Every function as (dotted name, node), an outer one before those inside it."""
    for child in ast.iter_child_nodes(node):
        named = isinstance(child, (*FUNCTIONS, ast.ClassDef))
        name = f"{prefix}{child.name}" if named else prefix
        if isinstance(child, FUNCTIONS):
            yield name, child
        yield from functions(child, f"{name}." if named else prefix)
