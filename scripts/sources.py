"""The source files that a result vouches for, found from the code, and a hash of each one's content.

Starts at the file of a show or bench and follows what its code names:

- imports, anywhere in a file;
- dotted names of modules in strings, such as "jaxrl_post.main";
- paths in strings, such as "--config=configs/demo.py", and paths joined by `/`.

It names rather a file too many than one too few. A show that runs what this cannot see says so in a constant, for example
SOURCES = ("scripts/x.py", "configs/*.py").

Invariant: comments, docstrings and formatting do not enter the hash of a Python file, so that prose makes no result stale.
"""

from __future__ import annotations

import ast
import hashlib
import re
from collections.abc import Iterable, Iterator
from pathlib import Path

PACKAGE = "jaxrl_post"
DOOR = f"{PACKAGE}.kernels"  # its modules lie in the top-level folder kernels/
BARE = ("scripts", "tests")  # folders whose modules are imported by bare names
CONFIGS = Path("configs")  # a config names another one by its path in there
# Whole folders that a path names only to find a file in them, and the project's table of tools.
LEFT_OUT = {PACKAGE, "kernels", "configs", "scripts", "scripts/shows", "scripts/results", "tests", "pyproject.toml"}
MODULE = re.compile(rf"{PACKAGE}(\.\w+)+")


def closure(root: Path, start: Path) -> list[str]:
    """Paths below `root` of the files that `start` may run or read, itself included; sorted."""
    found, waiting = set(), [start.resolve().relative_to(root.resolve()).as_posix()]
    while waiting:
        path = waiting.pop()
        if path in found:
            continue
        found.add(path)
        if path.endswith(".py"):
            waiting += [name for name in _named(root, path) if name not in found]
    return sorted(found)


def hashes(root: Path, paths: Iterable[str]) -> dict[str, str]:
    """Path -> hash of its content, 16 hexadecimal digits; paths without a file are left out."""
    return {path: content(root / path) for path in paths if (root / path).is_file()}


def content(file: Path) -> str:
    """The hash of one file: of a Python file that of its syntax, else that of its bytes."""
    data = file.read_bytes()
    if file.suffix == ".py":
        tree = ast.parse(data, str(file))
        _drop_docstrings(tree)
        data = _plain(tree).encode()
    return hashlib.sha256(data).hexdigest()[:16]


def _drop_docstrings(tree: ast.Module) -> None:
    for node in ast.walk(tree):
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)) and ast.get_docstring(
            node, clean=False
        ):
            del node.body[0]


def _plain(node: object) -> str:
    """The syntax as text. Empty fields are left out, because Python versions differ in which ones there are."""
    if isinstance(node, ast.AST):
        fields = (f"{name}={_plain(value)}" for name, value in ast.iter_fields(node) if value not in (None, []))
        return f"{type(node).__name__}({','.join(fields)})"
    if isinstance(node, list):
        return f"[{','.join(map(_plain, node))}]"
    return repr(node)


def _named(root: Path, path: str) -> Iterator[str]:
    """The files that one file's code names."""
    tree = ast.parse((root / path).read_text(), path)
    _drop_docstrings(tree)
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield from _module(root, path, alias.name)
        elif isinstance(node, ast.ImportFrom):
            origin = _origin(path, node)
            for name in (origin, *(f"{origin}.{alias.name}" for alias in node.names)):
                yield from _module(root, path, name)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            for match in MODULE.finditer(node.value):
                yield from _module(root, path, match[0])
            text = node.value.partition("=")[2] or node.value
            if "/" in text:
                yield from _files(root, (text,))
        elif isinstance(node, ast.BinOp) and isinstance(node.op, ast.Div):
            joined = _joined(node)
            if joined:
                folders = dict.fromkeys((Path(path).parent, *({CONFIGS} & {*Path(path).parents})))
                yield from _files(root, (joined, *(f"{folder}/{joined}" for folder in folders)))


def _origin(path: str, node: ast.ImportFrom) -> str:
    if not node.level:
        return node.module or ""
    return ".".join([*Path(path).parts[: -node.level], *([node.module] if node.module else [])])


def _module(root: Path, importer: str, name: str) -> Iterator[str]:
    """The file of a module and those of the packages around it; nothing for other libraries."""
    parts = name.split(".")
    if parts[0] == PACKAGE:
        for size in range(1, len(parts) + 1):
            yield from _there(root, "/".join(parts[:size]))
        if name.startswith(f"{DOOR}."):
            yield from _there(root, f"kernels/{'/'.join(parts[2:])}")
    else:
        folders = dict.fromkeys([Path(importer).parent.as_posix(), *BARE])
        yield from (path for folder in folders for path in _there(root, f"{folder}/{'/'.join(parts)}"))


def _there(root: Path, stem: str) -> Iterator[str]:
    yield from (
        path for path in (f"{stem}.py", f"{stem}/__init__.py", f"{stem}/__main__.py") if (root / path).is_file()
    )


def _joined(node: ast.expr) -> str:
    """`x / "configs" / "demo.py"` -> configs/demo.py: the constant parts, up to the first part that is none."""
    parts: list[str] = []
    while isinstance(node, ast.BinOp) and isinstance(node.op, ast.Div):
        constant = isinstance(node.right, ast.Constant) and isinstance(node.right.value, str)
        parts = [node.right.value, *parts] if constant else []
        node = node.left
    return "/".join(parts)


def _files(root: Path, candidates: tuple[str, ...]) -> Iterator[str]:
    """Those of the paths that are there; of a folder, every file in it."""
    for text in candidates:
        path = Path(text)
        if path.is_absolute() or ".." in path.parts or len(text) > 200 or path.as_posix() in LEFT_OUT or "\n" in text:
            continue
        if "*" in text and "*" not in path.parts[0]:
            yield from (file.relative_to(root).as_posix() for file in sorted(root.glob(text)) if file.is_file())
        elif (root / path).is_file():
            yield path.as_posix()
        elif (root / path).is_dir() and not path.parts[0].startswith("."):
            inside = (file for file in sorted((root / path).rglob("*")) if file.is_file())
            yield from (file.relative_to(root).as_posix() for file in inside if file.suffix != ".pyc")
