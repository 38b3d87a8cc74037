"""Checks of README.md and docs/: links, named files and options, commands and code blocks. Each returns what is wrong.

Nothing here runs a command. tests/test_docs.py applies every check to the project and to planted mistakes;
scripts/shows/docs.py really runs what is named here.
"""

from __future__ import annotations

import importlib
import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import prose

from jaxrl_post import config
from jaxrl_post.__main__ import COMMANDS
from jaxrl_post.simulate import settings

ROOT = prose.ROOT
README_LINES = 130
FOLDERS = ("jaxrl_post", "kernels", "configs", "scripts", "notebooks", "tests", "docs", "constraints")
FLAGS = ("--dry-run", "--resume", "--help")
VALUED = ("--config", "--run-dir", "--resume", "--branch", "--slice")
_FENCE = re.compile(r"^```(?P<kind>\w*)\n(?P<body>.*?)^```$", re.DOTALL | re.MULTILINE)
_INLINE = re.compile(r"(?<!`)`([^`\n]+)`(?!`)")
_LINK = re.compile(r"!?\[[^\]]*\]\(([^)\s]+)\)")


@dataclass(frozen=True, kw_only=True)
class Command:
    """A command of a page. `environment`: the variables set before it; `words`: the rest."""

    page: str
    text: str
    words: tuple[str, ...]
    environment: dict[str, str] = field(default_factory=dict)


def names(root: Path = ROOT) -> list[str]:
    """Returns the pages as paths below the root."""
    return [page.relative_to(root).as_posix() for page in prose.pages(root)]


def outside_blocks(text: str) -> str:
    """Returns a page without its code blocks and comments."""
    return re.sub(r"<!--.*?-->", "", _FENCE.sub("", text), flags=re.DOTALL)


# ---- links


def broken_links(page: Path) -> list[str]:
    """Returns relative links whose file or heading does not exist. Absolute addresses are refused too: none is checked."""
    out = []
    for target in _LINK.findall(_INLINE.sub("", outside_blocks(page.read_text(encoding="utf-8")))):
        place, _, anchor = target.partition("#")
        file = (page.parent / place).resolve() if place else page
        if "://" in target or not file.exists():
            out.append(f"{page.name}: {target}")
        elif anchor and anchor not in anchors(file.read_text(encoding="utf-8")):
            out.append(f"{page.name}: {target} names no heading")
    return out


def anchors(text: str) -> set[str]:
    """Returns the anchors of a page's headings."""
    headings = re.findall(r"^#+ (.+)$", _FENCE.sub("", text), re.MULTILINE)
    return {re.sub(r"[ -]+", "-", re.sub(r"[^\w\- ]", "", heading.lower())).strip("-") for heading in headings}


# ---- names


def inline_code(text: str) -> Iterator[str]:
    """Yields inline code. Of a table that compares option names with verl's, only the first column is ours."""
    foreign = False
    for line in outside_blocks(text).splitlines():
        foreign = line.startswith("|") and (
            foreign or ("verl" in line and "TRL" in line and "`" not in line.split("|")[2])
        )
        yield from _INLINE.findall(line.split("|")[1] if foreign else line)


def missing_files(page: Path, root: Path = ROOT) -> list[str]:
    """Returns paths of the project, in inline code, that do not exist. A config may have a choice behind a colon."""
    codes = [code for code in inline_code(page.read_text(encoding="utf-8")) if "/" in code and " " not in code]
    codes = [re.sub(r"(?<=\.py):[\w.-]+$", "", code) for code in codes]
    paths = [code for code in codes if code.split("/")[0] in FOLDERS and not re.search(r"[<>{}]|NAME", code)]
    return [f"{page.name}: {path}" for path in paths if not any(root.glob(path.rstrip("/")))]


def unknown_options(page: Path) -> list[str]:
    """Returns `section.option` in inline code that no run has."""
    sections = {name: set(of) for name, of in config.default().to_dict().items() if isinstance(of, dict)}
    out = []
    for code in inline_code(page.read_text(encoding="utf-8")):
        if found := re.fullmatch(r"(?:--config\.)?(\w+)\.(\w+)(?:=\S+)?", code):
            section, option = found.groups()
            if option not in sections.get(section, {option}) and option not in ("py", "md", "json", "jsonl"):
                out.append(f"{page.name}: {code}")
    return out


def missing_functions(page: Path) -> list[str]:
    """Returns `package.module:name` in inline code that cannot be imported."""
    out = []
    for code in inline_code(page.read_text(encoding="utf-8")):
        found = re.fullmatch(r"(jaxrl_post[\w.]+):(\w+)", code)
        if found and not hasattr(importlib.import_module(found[1]), found[2]):
            out.append(f"{page.name}: {code}")
    return out


# ---- commands and code


def commands(page: Path) -> list[Command]:
    """Returns the commands of a page: lines of blocks without a language, and inline code that begins as one."""
    text = page.read_text(encoding="utf-8")
    lines = [line for kind, body in _FENCE.findall(text) if not kind for line in body.splitlines()]
    lines += [code for code in _INLINE.findall(outside_blocks(text)) if re.match(r"(python|make) ", code)]
    out = []
    for line in lines:
        words = shlex.split(line, comments=True)
        count = next((at for at, word in enumerate(words) if not re.match(r"[A-Z_]+=", word)), len(words))
        if words:
            environment = dict(word.split("=", 1) for word in words[:count])
            out.append(Command(page=page.name, text=line, words=tuple(words[count:]), environment=environment))
    return out


def wrong_with(command: Command, root: Path = ROOT) -> str:
    """Returns why a command cannot run, in a sentence; "" when it can."""
    match command.words:
        case ("make", *targets):
            return _make(root, [target for target in targets if "=" not in target])
        case ("python", "-m", "jaxrl_post.main", *arguments):
            return _run(arguments, config.Config)
        case ("python", "-m", "jaxrl_post.simulate", *arguments):
            return _run(_without(arguments, "--json", "--trace"), settings.Simulation)
        case ("python", "-m", "jaxrl_post", "train", *arguments):
            return _run(arguments, config.Config)
        case ("python", "-m", "jaxrl_post", command, *_) if command in COMMANDS:
            return ""
        case ("python", "-m", module, *_):
            return "" if (root / f"{module.replace('.', '/')}.py").is_file() else f"there is no module {module}"
        case ("python", script, *arguments):
            return _script(root, script, arguments)
    return "it is neither make nor python"


def _make(root: Path, targets: list[str]) -> str:
    known = set(re.findall(r"^([\w-]+):", (root / "Makefile").read_text(), re.MULTILINE))
    return "".join(f"the Makefile has no target {target}" for target in targets if target not in known)


def _run(arguments: list[str], schema: type) -> str:
    """Resolves the config with its overrides, as a run does first."""
    files, overrides = [], []
    for argument in arguments:
        name, _, value = argument.partition("=")
        if name.startswith("--config."):
            overrides.append(argument.removeprefix("--config."))
        elif name == "--config" and value:
            files.append(value)
        elif argument not in FLAGS and not (name in VALUED and value) and arguments[0] != "--help":
            return f"there is no flag {argument}"
    try:
        for file in files:
            config.resolve(config.load(file), overrides, schema)
    except ValueError as error:
        return str(error)
    return ""


def _without(arguments: list[str], *flags: str) -> list[str]:
    """Returns the arguments without those flags and the values behind them."""
    return [word for before, word in zip(["", *arguments], arguments) if word not in flags and before not in flags]


def _script(root: Path, script: str, arguments: list[str]) -> str:
    if not (root / script).is_file():
        return f"there is no file {script}"
    folder = {"scripts/show.py": "shows", "scripts/bench.py": "benches"}.get(script)
    name = arguments[0] if arguments else "--all"
    if folder and name not in ("--all", "NAME"):
        file = root / "scripts" / folder / f"{name.replace('-', '_')}.py"
        return "" if file.is_file() else f"there is no {file.name} in scripts/{folder}"
    return ""


def python_blocks(page: Path) -> list[str]:
    """Returns the Python code blocks of a page."""
    return [body for kind, body in _FENCE.findall(page.read_text(encoding="utf-8")) if kind == "python"]


def unknown_kinds(page: Path) -> list[str]:
    """Returns the languages of code blocks that no check runs."""
    return [kind for kind, _ in _FENCE.findall(page.read_text(encoding="utf-8")) if kind not in ("", "python", "text")]
