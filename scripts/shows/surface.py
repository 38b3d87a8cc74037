"""Nothing that a user names is lost: commands, flags, options, configs, pages, endpoints, metrics and modules that pages import.

The names are taken from the base commit (scripts/baseline.py) and looked for in the present tree, both in the same way.
Commands and flags come from the help, options from the schema, configs and pages from the files. Endpoints come from the
routes of the servers, metrics from the texts in the code, and modules from the imports in the pages.

A name that is gone counts as kept if the changelog writes "`OLD` is now `NEW`" and NEW is there. An old option must then be
refused by a sentence that says NEW. An old config must load.
"""

from __future__ import annotations

import ast
import json
import re
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "scripts"), str(ROOT / "tests")]

import baseline  # noqa: E402
import house  # noqa: E402

MINUTES = 5.0
SOURCES = ("jaxrl_post/**/*.py", "configs/**/*.py", "docs/*.md", "README.md", "CHANGELOG.md", "tests/house.py")
SERVERS = "serve"  # the room whose routes are endpoints
FLAG = re.compile(r"(?<![\w-])--[a-z][a-z0-9-]*[a-z0-9]")
METRIC = re.compile(r"[a-z_]+/[a-z][\w@{}.]*(/[\w@{}.]+)*")
IMPORTED = re.compile(r"^\s*(?:from (jaxrl_post[\w.]*) import ([\w, ]+)|import (jaxrl_post[\w.]*))", re.M)
RENAMED = re.compile(r"`([^`]+)` is now\s+`([^`]+)`")
OPTIONS = "import json; from jaxrl_post.config import Config, fields; print(json.dumps([o.name for o in fields.options(Config)]))"
LOADS = """
import json, sys
from jaxrl_post import config
lost = {}
for name in sys.argv[1:]:
    try:
        config.load(name)
    except ValueError as error:
        lost[name] = str(error)
print(json.dumps(lost))
"""
IMPORTS = """
import importlib, json, sys
lost = {}
for name in sys.argv[1:]:
    module, _, attribute = name.partition(":")
    try:
        found = importlib.import_module(module)
        found = getattr(found, attribute, None) or importlib.import_module(f"{module}.{attribute}") if attribute else found
    except ImportError as error:
        lost[name] = str(error)
print(json.dumps(lost))
"""


def show(record) -> None:
    base = baseline.checkout(record.root)
    said = (record.root / "CHANGELOG.md").read_text().partition("## [Unreleased]")[2]
    renamed = dict(RENAMED.findall(said))
    record.figure("base", baseline.BASE)
    old, new = _surface(base), _surface(record.root)
    for kind, names in old.items():
        record.figure(f"{kind}.base", len(names), at_least=5)
        gone = sorted({*names} - {*new[kind]})
        record.figure(f"{kind}.gone", gone)
        there = {*new[kind], *(name.split(" ")[-1] for name in new[kind])}  # also the flag of `command --flag`
        lost = [name for name in gone if renamed.get(name.split(" ")[-1]) not in there]
        record.figure(f"{kind}.lost", lost, equals=[])
        if kind == "options":
            silent = [name for name in gone if not _answers(record.root, name, renamed.get(name, ""))]
            record.figure("options.that_do_not_answer", silent, equals=[])
    configs = sorted(path.relative_to(base).as_posix() for path in base.glob("configs/**/*.py") if path.stem[0] != "_")
    record.figure("configs.base", len(configs), at_least=20)
    record.figure(
        "configs.that_do_not_load", _python(record.root, LOADS, *configs), equals=_python(base, LOADS, *configs)
    )
    modules = sorted(_modules(base))
    record.figure("modules.base", len(modules), at_least=5)
    gone = _python(record.root, IMPORTS, *modules)
    record.figure("modules.gone", gone)
    said = [f"`{old}` is now `{new}`" for old, new in renamed.items()]
    record.figure(
        "modules.lost", {name: why for name, why in gone.items() if not any(map(why.endswith, said))}, equals={}
    )


def _surface(root: Path) -> dict[str, list[str]]:
    """Kind -> the names of one tree."""
    tree = house.Tree(root)
    commands = re.findall(r"^ *(\w+)  +\S", _help(root), re.M)
    with ThreadPoolExecutor(2) as pool:
        helps = dict(zip(commands, pool.map(lambda name: _help(root, name), commands), strict=True))
    return {
        "commands": commands,
        "flags": sorted({f"{name} {flag}" for name, text in helps.items() for flag in FLAG.findall(text)}),
        "options": _python(root, OPTIONS),
        "pages": sorted(path.name for path in root.glob("docs/*.md")),
        "endpoints": sorted({*_endpoints(tree)}),
        "metrics": sorted({*_metrics(tree)}),
    }


def _help(root: Path, *command: str) -> str:
    words = [sys.executable, "-m", "jaxrl_post", *command, "--help"]
    done = subprocess.run(words, cwd=root, text=True, capture_output=True, timeout=300)
    return done.stdout + done.stderr  # a command without a help names its flags in a sentence


def _python(root: Path, code: str, *arguments: str):
    """What a program prints as JSON, run in a tree."""
    words = [sys.executable, "-c", f"import sys; sys.path.insert(0, '.')\n{code}", *arguments]
    return json.loads(
        subprocess.run(words, cwd=root, text=True, stdout=subprocess.PIPE, check=True, timeout=600).stdout
    )


def _endpoints(tree: house.Tree) -> Iterator[str]:
    """The first argument of every Route of the servers, with names in braces for what is computed."""
    for module, source in tree.modules.items():
        for node in ast.walk(source) if tree.room(module) == SERVERS else ():
            if isinstance(node, ast.Call) and ast.unparse(node.func).endswith("Route") and node.args:
                yield _text(node.args[0])


def _metrics(tree: house.Tree) -> Iterator[str]:
    """Texts of the package's code that have the form of a metric's name, `group/name`; docstrings left out."""
    for source in tree.modules.values():
        for node in ast.walk(source):
            text = _text(node) if isinstance(node, (ast.Constant, ast.JoinedStr)) else ""
            if METRIC.fullmatch(text) and "." not in text.rpartition("/")[2]:
                yield text


def _text(node: ast.expr) -> str:
    """A text, with {} for each computed part of an f-string."""
    if isinstance(node, ast.JoinedStr):
        return "".join(part.value if isinstance(part, ast.Constant) else "{}" for part in node.values)
    return node.value if isinstance(node, ast.Constant) and isinstance(node.value, str) else ""


def _modules(root: Path) -> Iterator[str]:
    """`module:name` of what the pages import."""
    for page in [root / "README.md", *sorted(root.glob("docs/*.md"))]:
        for module, names, alone in IMPORTED.findall(page.read_text()):
            yield from (f"{module}:{name.split(' as ')[0].strip()}" for name in names.split(",") if name.strip())
            if alone:
                yield f"{alone}:"


def _answers(root: Path, option: str, new: str) -> bool:
    """Whether an option that is gone is refused by a sentence that names the new one."""
    words = [sys.executable, "-m", "jaxrl_post.main", "--config=configs/demo.py", f"--config.{option}=1", "--dry-run"]
    done = subprocess.run(words, cwd=root, text=True, capture_output=True, timeout=300)
    return bool(new) and done.returncode != 0 and new in done.stderr
