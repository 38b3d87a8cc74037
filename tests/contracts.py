"""Two more rules over sources: every method of a protocol has a caller, every key of the config is set and read.

A caller is recognised by the name of what it calls on: the words of the house (engine, scheduler, learner, rewards,
ring), a parameter annotated with the protocol, or the target of a loop over a literal tuple of such names.
"""

from __future__ import annotations

import ast
import dataclasses
import typing
from collections.abc import Iterator, Mapping
from pathlib import Path

from house import Tree

WORDS = {
    "Engine": {"engine"},
    "Scheduler": {"scheduler"},
    "Learner": {"learner"},
    "Rewards": {"rewards"},
    "Ring": {"ring"},
    "Source": {"source"},
}


def protocols(tree: Tree) -> dict[str, set[str]]:
    """Name of each protocol -> its methods and properties."""
    source = tree.modules[f"{tree.package}.ring.protocols"]
    return {
        node.name: {f.name for f in node.body if isinstance(f, ast.FunctionDef)}
        for node in source.body
        if isinstance(node, ast.ClassDef) and any(_last(base) == "Protocol" for base in node.bases)
    }


def uncalled(tree: Tree) -> list[str]:
    """Protocol methods that nobody in the package uses. A class that implements the protocol is no user of it."""
    out = []
    for protocol, methods in protocols(tree).items():
        used = set()
        for module, source in tree.modules.items():
            if module != f"{tree.package}.ring.protocols":
                used |= _uses(source, protocol, methods)
        out += [f"{protocol}.{method}: nobody calls it" for method in sorted(methods - used)]
    return out


def _uses(source: ast.Module, protocol: str, methods: set[str]) -> set[str]:
    nodes = list(_outside_of_implementers(source, methods))
    names = WORDS.get(protocol, {protocol.lower()}) | {
        node.arg for node in nodes if isinstance(node, ast.arg) and protocol in _names(node.annotation)
    }
    for node in nodes:
        if (
            isinstance(node, (ast.For, ast.comprehension))
            and isinstance(node.iter, (ast.Tuple, ast.List))
            and any(_is_one_of(item, names) for item in node.iter.elts)
        ):
            names |= {_last(node.target)}
    return {
        node.attr
        for node in nodes
        if isinstance(node, ast.Attribute)
        and isinstance(node.ctx, ast.Load)
        and node.attr in methods
        and _is_one_of(node.value, names)
    }


def _outside_of_implementers(node: ast.AST, methods: set[str]) -> Iterator[ast.AST]:
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.ClassDef) and methods <= {getattr(f, "name", "") for f in child.body}:
            continue
        yield child
        yield from _outside_of_implementers(child, methods)


def _names(annotation: ast.expr | None) -> set[str]:
    if isinstance(annotation, ast.Constant) and isinstance(annotation.value, str):
        annotation = ast.parse(annotation.value, mode="eval")
    return {_last(node) for node in ast.walk(annotation)} if annotation is not None else set()


def _is_one_of(node: ast.expr, names: set[str]) -> bool:
    name = _last(node).strip("_")
    return name in names or name.rpartition("_")[2] in names


def _last(node: ast.AST) -> str:
    return node.id if isinstance(node, ast.Name) else node.attr if isinstance(node, ast.Attribute) else ""


def leaves(schema: type, where: str = "") -> list[str]:
    """Dotted names of all values of a config schema."""
    hints = typing.get_type_hints(schema)
    out = []
    for f in dataclasses.fields(schema):
        full = f"{where}.{f.name}" if where else f.name
        out += leaves(hints[f.name], full) if dataclasses.is_dataclass(hints[f.name]) else [full]
    return out


def assigned(file: Path) -> set[str]:
    """Dotted names that a config file assigns: `config.a.b = value` gives a.b and a (a mapping may be a value)."""
    out = set()
    for node in ast.walk(ast.parse(file.read_text(), str(file))):
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            chain = ast.unparse(node).split(".")[1:]
            out |= {".".join(chain[:length]) for length in range(1, len(chain) + 1)}
    return out


def changed(values: Mapping, defaults: Mapping, names: list[str]) -> set[str]:
    """Those of the names whose value differs from the default, in nested dicts."""

    def at(tree, name):
        for part in name.split("."):
            tree = tree[part]
        return tree

    return {name for name in names if at(values, name) != at(defaults, name)}


def unread(tree: Tree, names: list[str]) -> list[str]:
    """Config values whose last name is read nowhere but in the config's own files; its derived values count."""
    read = set()
    for module, source in tree.modules.items():
        nodes = ast.walk(source)
        if tree.room(module) == "config":
            nodes = (
                part
                for node in ast.walk(source)
                if isinstance(node, ast.ClassDef)
                for f in node.body
                if isinstance(f, ast.FunctionDef)
                for part in ast.walk(f)
            )
        read |= {node.attr for node in nodes if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load)}
    return [name for name in names if name.rpartition(".")[2] not in read]
