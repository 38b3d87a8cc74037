"""Which modules of the package read which option, found in their sources.

A value is followed from where its type is written: a parameter or a field annotated with Config or with a section, or a
name `config` without a type. From there it goes through local names, tuples of names and attributes. What a derived
value of the schema reads counts for the modules that read the derived value. Reads in the rules do not count.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

from jaxrl_post.config import fields
from jaxrl_post.config.schema import Config

PACKAGE = Path(__file__).resolve().parents[1]
_SCHEMA = ("generation", "training", "monitoring", "scoring", "schema")
_WHOLE = ("config", "c")  # names without a type that are taken for a whole Config
_Scope = dict[str, str]  # a name, or an attribute `.name` -> the section that it holds; "" is the whole Config


def readers(schema: type = Config, package: Path = PACKAGE) -> dict[str, list[str]]:
    """Returns the modules that read each option, by its full name: dotted names without the package's."""
    types = {"Config": ""} | {kind.__name__: name for name, (kind, _) in fields.members(schema).items()}
    sources = {path: ast.parse(path.read_text(encoding="utf-8")) for path in sorted(package.rglob("*.py"))}
    outer = {path: tree for path, tree in sources.items() if path.parent != package / "config"}
    shared: _Scope = {}
    for tree in outer.values():
        shared |= _fields(tree, types)
    reads: dict[str, set[str]] = {}
    for path, tree in outer.items():
        module = ".".join(path.relative_to(package).with_suffix("").parts).removesuffix(".__init__")
        for name in _Walk(types, shared).reads(tree):
            reads.setdefault(name, set()).add(module)
    for name, inner in _derived(sources, package, types):
        for option in inner:
            reads.setdefault(option, set()).update(reads.get(name, ()))
    return {option.name: sorted(reads.get(option.name, ())) for option in fields.options(schema)}


def _derived(sources: dict[Path, ast.Module], package: Path, types: _Scope) -> list[tuple[str, set[str]]]:
    """Returns what each derived value of the schema reads, those that read other derived values first."""
    found = {}
    for path in (package / "config" / f"{name}.py" for name in _SCHEMA):
        for node in sources[path].body:
            for f in node.body if isinstance(node, ast.ClassDef) and node.name in types else ():
                if isinstance(f, ast.FunctionDef) and not f.name.startswith("__"):
                    where = types[node.name]
                    name = f"{where}.{f.name}" if where else f.name
                    found[name] = set(_Walk(types, {}).reads(f, {"self": where}))
    order: list[str] = []

    def visit(name: str) -> None:
        if name in found and name not in order:
            for inner in sorted(found[name]):
                visit(inner)
            order.append(name)

    for name in found:
        visit(name)
    return [(name, found[name]) for name in reversed(order)]


def _fields(tree: ast.Module, types: _Scope) -> _Scope:
    """Returns the fields of classes that are annotated with a section, as attributes."""
    out, names = {}, _names(tree)
    for node in ast.walk(tree):
        for f in node.body if isinstance(node, ast.ClassDef) else ():
            if isinstance(f, ast.AnnAssign) and (section := _annotated(f.annotation, types, names)) is not None:
                out[f".{ast.unparse(f.target)}"] = section
    return out


def _names(tree: ast.Module) -> set[str]:
    """Returns the spellings that stand for the config's classes: `BatchConfig`, `config.BatchConfig`, `configs.Config`."""
    out = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("jaxrl_post"):
            for alias in node.names:
                if node.module.startswith("jaxrl_post.config"):
                    out.add(alias.asname or alias.name)
                elif alias.name == "config":
                    out.add(f"{alias.asname or alias.name}.")
    return out


def _annotated(node: ast.expr | None, types: _Scope, names: set[str]) -> str | None:
    """Returns the section that an annotation names; None where it names none."""
    if not isinstance(node, (ast.Name, ast.Attribute)):
        return None
    before, _, last = ast.unparse(node).rpartition(".")
    known = last in names if not before else f"{before}." in names
    return types.get(last) if known else None


class _Walk:
    """Follows the values of one module."""

    def __init__(self, types: _Scope, shared: _Scope):
        self._types, self._shared, self._names = types, shared, set()

    def reads(self, tree: ast.AST, scope: _Scope | None = None) -> Iterator[str]:
        """Yields the full name of everything that is read of a config or of a section."""
        self._names = _names(tree) if isinstance(tree, ast.Module) else set()
        scope = dict(scope or self._shared)
        for node in ast.walk(tree):  # attributes that hold a section hold it in every method
            if isinstance(node, ast.FunctionDef):
                self._enter(node, inner := dict(scope))
                scope |= {name: section for name, section in inner.items() if name.startswith(".")}
        yield from self._inside(tree, scope)

    def _inside(self, tree: ast.AST, scope: _Scope) -> Iterator[str]:
        for node in ast.iter_child_nodes(tree):
            here = scope
            if isinstance(node, (ast.FunctionDef, ast.Lambda)):
                self._enter(node, here := dict(scope))
            elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load):
                section = self._section(node.value, scope)
                if section is not None:
                    yield f"{section}.{node.attr}" if section else node.attr
            yield from self._inside(node, here)

    def _enter(self, function: ast.FunctionDef | ast.Lambda, scope: _Scope) -> None:
        """Adds the parameters of a function that hold a config, and the names that it assigns from them."""
        for arg in (*function.args.posonlyargs, *function.args.args, *function.args.kwonlyargs):
            section = _annotated(arg.annotation, self._types, self._names)
            if section is None and arg.annotation is None and arg.arg in _WHOLE:
                section = ""
            if section is not None:
                scope[arg.arg] = section
            elif arg.arg != "self":
                scope.pop(arg.arg, None)
        for node in ast.walk(function):
            if isinstance(node, ast.Assign):
                for target, value in self._pairs(node.targets[0], node.value):
                    resolved = isinstance(value, ast.Call) and ast.unparse(target) == _WHOLE[0]
                    section = "" if resolved else self._section(value, scope)
                    if section is not None:
                        scope[f".{target.attr}" if isinstance(target, ast.Attribute) else ast.unparse(target)] = section

    def _pairs(self, target: ast.expr, value: ast.expr) -> list[tuple[ast.expr, ast.expr]]:
        if isinstance(target, ast.Tuple) and isinstance(value, ast.Tuple):
            return list(zip(target.elts, value.elts, strict=False))
        return [(target, value)]

    def _section(self, node: ast.expr, scope: _Scope) -> str | None:
        """Returns the section that an expression holds: "" for a whole Config, None for anything else."""
        if isinstance(node, ast.Name):
            return scope.get(node.id)
        if not isinstance(node, ast.Attribute):
            return None
        of = self._section(node.value, scope)
        if of == "" and node.attr in self._types.values():
            return node.attr
        return scope.get(f".{node.attr}") if of is None else None
