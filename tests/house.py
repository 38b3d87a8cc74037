"""The rules of the house as functions over source trees: each takes a `Tree` and returns the violations as sentences.

Nothing here imports the project: sources are read with `ast`, so a rule also sees what a lazy import would hide.
tests/test_house.py applies every rule to the project and, with a planted violation, to a synthetic tree.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from pathlib import Path

FLOORS = {  # of rooms: files and folders on the first level of the package
    0: ("ring", "parallel", "kernels"),
    1: ("config", "data", "models"),
    2: ("algorithms", "engine", "rewards", "runs", "scheduler"),
    3: ("telemetry", "trainer"),
    4: ("simulate",),
    5: ("launch",),
    6: ("serve",),
    7: ("main",),
    8: ("commands",),
    9: ("__main__",),
}
FLOOR = {room: floor for floor, rooms in FLOORS.items() for room in rooms}
HOST = (  # module prefixes without jax
    "ring",
    "config",
    "scheduler",
    "simulate",
    "rewards",
    "engine.host",
    "engine.row_plan",
    "engine.step_cost",
    "parallel.devices",
    "engine.speculation.acceptance",
    "engine.speculation.corpus",
    "engine.speculation.ngrams",
    "engine.speculation.suffix_array",
    "runs.buckets",
    "runs.checkpoint.identity",
    "runs.checkpoint.log_marks",
    "runs.journal",
    "runs.metric_rows",
    "telemetry.length_bias",
)
DEVICE_LIBRARIES = {"jax", "jaxlib", "flax", "optax", "orbax", "chex"}
ARRAY_FREE = ("engine.row_plan",)  # array code over whatever module it is handed
FORBIDDEN_NAMES = {"utils", "util", "common", "misc", "helpers", "helper", "base", "core", "manager", "managers", "hub"}
SIMULATOR_WORDS = {"sim", "simulate", "simulated", "simulator", "simulation"}
LOOP, LOOP_KNOWS = "ring.loop", ("ring.types", "ring.protocols")
FIRST_LEVEL = 3  # modules directly in the package
FILE_LINES, FUNCTION_LINES = 600, 60  # what still reads from top to bottom
CONFIG_DICT_MODULES = {"config.reader", "main", "simulate.simulation"}  # the only ones that may see a ConfigDict
CONFIG_ORDER = (  # each imports only those before it
    "address",
    "fields",
    "local_path",
    "relations",
    "scheduling",
    "learning",
    "scoring",
    "rules",
    "generation",
    "token_terms",
    "training",
    "monitoring",
    "schema",
    "elsewhere",
    "reader",
    "reference",
    "command_line",
)


class Tree:
    """The sources of one checkout: the package, the top-level kernels/ (modules of the package too) and scripts/."""

    def __init__(self, root: Path, package: str = "jaxrl_post"):
        self.root, self.package = root, package

    @cached_property
    def modules(self) -> dict[str, ast.Module]:
        """Dotted name -> syntax tree, of the package and of kernels/."""
        files = [(path, path.relative_to(self.root)) for path in sorted((self.root / self.package).rglob("*.py"))]
        files += [
            (path, Path(self.package) / path.relative_to(self.root))
            for path in sorted((self.root / "kernels").rglob("*.py"))
        ]
        return {_dotted(relative): ast.parse(path.read_text(), str(path)) for path, relative in files}

    @cached_property
    def sources(self) -> dict[str, ast.Module]:
        """Path in the checkout -> syntax tree, of all that is shipped: package, kernels/, configs/, scripts/, notebooks/."""
        folders = (self.package, "kernels", "configs", "scripts", "notebooks")
        paths = [path for folder in folders for path in sorted((self.root / folder).rglob("*.py"))]
        return {path.relative_to(self.root).as_posix(): ast.parse(path.read_text(), str(path)) for path in paths}

    def room(self, module: str) -> str:
        """`jaxrl_post.engine.row_program` -> engine; the package itself -> ''."""
        return module.partition(".")[2].partition(".")[0]

    def imports(self, module: str) -> Iterator[str]:
        """Dotted names that it imports, anywhere in it; of `from a import b` it is a.b where that is a module, else a."""
        for node in ast.walk(self.modules[module]):
            if isinstance(node, ast.Import):
                yield from (alias.name for alias in node.names)
            elif isinstance(node, ast.ImportFrom):
                origin = self._origin(module, node)
                for alias in node.names:
                    full = f"{origin}.{alias.name}"
                    yield full if full in self.modules or self._is_folder(full) else origin
            elif isinstance(node, ast.Call) and _last(node.func) in ("import_module", "__import__"):
                yield from (a.value for a in node.args[:1] if isinstance(a, ast.Constant) and isinstance(a.value, str))

    def inner_imports(self, module: str) -> Iterator[str]:
        """Those of `imports` that lie in the package."""
        return (name for name in self.imports(module) if name.split(".")[0] == self.package)

    def _origin(self, module: str, node: ast.ImportFrom) -> str:
        if not node.level:
            return node.module
        is_folder = module == self.package or any(name.startswith(f"{module}.") for name in self.modules)
        parts = module.split(".")[: len(module.split(".")) - node.level + is_folder]
        return ".".join(parts + ([node.module] if node.module else []))

    def _is_folder(self, name: str) -> bool:
        return any(other.startswith(f"{name}.") for other in self.modules)


def _dotted(relative: Path) -> str:
    parts = relative.with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def _last(node: ast.expr) -> str:
    """The last identifier of a name or an attribute chain, else ''."""
    return node.id if isinstance(node, ast.Name) else node.attr if isinstance(node, ast.Attribute) else ""


def unknown_rooms(tree: Tree) -> list[str]:
    return [
        f"{module}: room {tree.room(module)!r} is not in the table of floors"
        for module in tree.modules
        if tree.room(module) and tree.room(module) not in FLOOR
    ]


def upward_imports(tree: Tree) -> list[str]:
    """Imports go strictly down; inside one folder they are free."""
    out = []
    for module in tree.modules:
        source = tree.room(module)
        for target in map(tree.room, tree.inner_imports(module)):
            if not source and target:
                out.append(f"{module} imports {target}: the package itself imports no room")
            elif target in FLOOR and source in FLOOR and target != source and FLOOR[target] >= FLOOR[source]:
                out.append(f"{module} (floor {FLOOR[source]}) imports {target} (floor {FLOOR[target]})")
    return out


def cycles(tree: Tree) -> list[str]:
    graph = {
        module: sorted({name for name in tree.inner_imports(module) if name in tree.modules and name != module})
        for module in tree.modules
    }
    out, done = [], set()

    def visit(module, path):
        if module in path:
            out.append(" -> ".join([*path[path.index(module) :], module]))
        elif module not in done:
            for target in graph[module]:
                visit(target, [*path, module])
            done.add(module)

    for module in graph:
        visit(module, [])
    return out


def own_imports(tree: Tree) -> list[str]:
    """No module imports itself, which a careless move of a name leaves behind."""
    return [f"{module} imports itself" for module in tree.modules if module in tree.imports(module)]


def proxies(tree: Tree) -> list[str]:
    """No class passes unknown names on to another object by `__getattr__`: a wrapper says which calls it hands on."""
    return [
        f"{module}.{node.name} passes unknown names on"
        for module, source in tree.modules.items()
        for node in ast.walk(source)
        if isinstance(node, ast.ClassDef) and "__getattr__" in {getattr(inner, "name", "") for inner in node.body}
    ]


def under(module: str, prefixes: Sequence[str]) -> bool:
    """Whether `jaxrl_post.engine.host.replica` lies under one of the prefixes, for example `engine.host`."""
    name = module.partition(".")[2]
    return any(name == prefix or name.startswith(f"{prefix}.") for prefix in prefixes)


def first_level(tree: Tree) -> list[str]:
    """At most FIRST_LEVEL modules lie directly in the package."""
    files = sorted(path.name for path in (tree.root / tree.package).glob("*.py"))
    return [f"{len(files)} modules on the first level, at most {FIRST_LEVEL}: {', '.join(files)}"] * (
        len(files) > FIRST_LEVEL
    )


def host_imports(tree: Tree) -> list[str]:
    """Host modules name no device library; row_plan names no array library at all."""
    out = []
    for module in tree.modules:
        banned = DEVICE_LIBRARIES | ({"numpy"} if under(module, ARRAY_FREE) else set())
        if under(module, HOST):
            out += [f"{module} imports {name}" for name in tree.imports(module) if name.split(".")[0] in banned]
    return out


def loop_imports(tree: Tree) -> list[str]:
    """The loop knows only types and protocols."""
    return [
        f"{module} imports {name}"
        for module in tree.modules
        if under(module, (LOOP,))
        for name in tree.inner_imports(module)
        if not under(name, LOOP_KNOWS)
    ]


def config_dicts(tree: Tree) -> list[str]:
    """`resolve` ends the life of a ConfigDict: other rooms receive values."""
    return [
        f"{module} imports {name}"
        for module in tree.modules
        if module.removeprefix(f"{tree.package}.") not in CONFIG_DICT_MODULES
        for name in tree.imports(module)
        if name.split(".")[0] == "ml_collections"
    ]


def config_order(tree: Tree) -> list[str]:
    """Inside config/ imports go one way: the rules name options and know no schema."""
    out, face = [], f"{tree.package}.config"
    for module in (m for m in tree.modules if m.startswith(f"{face}.")):
        name = module.removeprefix(f"{face}.")
        if name not in CONFIG_ORDER:
            out.append(f"config: {name} is not in the order of its files")
            continue
        before = {f"{face}.{other}" for other in CONFIG_ORDER[: CONFIG_ORDER.index(name)]}
        out += [
            f"config: {name} imports {target.rpartition('.')[2]}"
            for target in tree.inner_imports(module)
            if target.startswith(face) and target not in before
        ]
    return out


def forbidden_names(tree: Tree) -> list[str]:
    """Of files and folders, word by word (train_utils counts), tests included."""
    paths = [
        path.relative_to(tree.root)
        for top in (tree.package, "kernels", "configs", "scripts", "notebooks", "tests")
        for path in sorted((tree.root / top).rglob("*"))
        if path.is_dir() or path.suffix == ".py"
    ]
    return [
        f"{path.as_posix()}: a name from {', '.join(sorted(words))}"
        for path in paths
        if (words := set(path.stem.lower().split("_")) & FORBIDDEN_NAMES)
    ]


def type_checking(tree: Tree) -> list[str]:
    return [
        f"{path}:{node.lineno}: TYPE_CHECKING"
        for path, source in tree.sources.items()
        for node in ast.walk(source)
        if isinstance(node, (ast.Name, ast.Attribute)) and _last(node) == "TYPE_CHECKING"
    ]


def broad_excepts(tree: Tree) -> list[str]:
    """Bare `except`, `except Exception`, `except BaseException`, and the same through contextlib.suppress."""
    out = []
    for path, source in tree.sources.items():
        for node in ast.walk(source):
            if isinstance(node, ast.ExceptHandler):
                kinds = node.type.elts if isinstance(node.type, ast.Tuple) else [node.type]
            elif isinstance(node, ast.Call) and _last(node.func) == "suppress":
                kinds = node.args
            else:
                continue
            if any(kind is None or _last(kind) in ("Exception", "BaseException") for kind in kinds):
                out.append(f"{path}:{node.lineno}: catches everything")
    return out


def simulator_in_scheduler(tree: Tree) -> list[str]:
    """No name of simulate in scheduler/: no import of it and no identifier that speaks of it."""
    out = []
    for module in (m for m in tree.modules if tree.room(m) == "scheduler"):
        out += [f"{module} imports {name}" for name in tree.inner_imports(module) if tree.room(name) == "simulate"]
        out += [
            f"{module}: identifier {name}"
            for name in sorted(set(_identifiers(tree.modules[module])))
            if set(re.sub(r"([a-z])([A-Z])", r"\1_\2", name).lower().split("_")) & SIMULATOR_WORDS
        ]
    return out


def _identifiers(source: ast.Module) -> Iterator[str]:
    for node in ast.walk(source):
        for name in ("id", "attr", "arg", "name", "asname"):
            value = getattr(node, name, None)
            if isinstance(value, str):
                yield value


def partition_specs(tree: Tree) -> list[str]:
    """PartitionSpec lives in parallel/mesh.py; jax.P is another name of it."""
    out = []
    for path, source in tree.sources.items():
        if path == f"{tree.package}/parallel/mesh.py":
            continue
        for node in ast.walk(source):
            spelled = {_last(node)} if isinstance(node, (ast.Name, ast.Attribute)) else set()
            if isinstance(node, ast.ImportFrom):
                spelled = {alias.name for alias in node.names}
                if (node.module or "").split(".")[0] == "jax" and "P" in spelled:
                    spelled.add("PartitionSpec")
            if isinstance(node, ast.Attribute) and node.attr == "P" and _last(node.value) in ("jax", "sharding"):
                spelled.add("PartitionSpec")
            if "PartitionSpec" in spelled:
                out.append(f"{path}:{node.lineno}: PartitionSpec outside parallel/mesh.py")
    return out


def package_folders(tree: Tree) -> list[str]:
    """Every folder of the package has an __init__.py, else no wheel holds it; kernels/ has none anywhere."""
    inside = {path.parent for path in (tree.root / tree.package).rglob("*.py")}
    out = [
        f"{folder.relative_to(tree.root).as_posix()}/ lacks __init__.py"
        for folder in sorted(inside)
        if not (folder / "__init__.py").is_file()
    ]
    return out + [
        f"{path.relative_to(tree.root).as_posix()} must not exist"
        for path in sorted((tree.root / "kernels").rglob("__init__.py"))
    ]


def long_files(tree: Tree, limit: int = FILE_LINES) -> dict[str, int]:
    """Path -> lines, of files over the limit."""
    lines = {path: len((tree.root / path).read_text().splitlines()) for path in tree.sources}
    return {path: count for path, count in lines.items() if count > limit}


def long_functions(tree: Tree, limit: int = FUNCTION_LINES) -> dict[str, int]:
    """`path:name` -> lines without decorators and docstring, of functions over the limit."""
    out = {}
    for path, source in tree.sources.items():
        for name, node in _functions(source, ""):
            doc = node.body[0] if ast.get_docstring(node, clean=False) is not None else None
            count = node.end_lineno - node.lineno + 1 - (doc.end_lineno - doc.lineno + 1 if doc else 0)
            if count > limit:
                out[f"{path}:{name}"] = count
    return out


def _functions(node: ast.AST, prefix: str) -> Iterator[tuple[str, ast.FunctionDef]]:
    for child in ast.iter_child_nodes(node):
        named = isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef))
        name = f"{prefix}{child.name}" if named else prefix
        if isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef)):
            yield name, child
        yield from _functions(child, f"{name}." if named else prefix)


def unsettled(found: Mapping[str, int], reasons: Mapping[str, str]) -> list[str]:
    """What is over its limit without a reason, and reasons that no longer have a case."""
    return [f"{name}: {count} and no reason given" for name, count in found.items() if not reasons.get(name)] + [
        f"{name}: has a reason and is within the limit" for name in reasons if name not in found
    ]
