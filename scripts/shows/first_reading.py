"""Whoever begins at README finds a loss, the decode step, and how to add a thing, in two files and 150 lines at most.

- Steps: README links to the table "Where things are" of docs/architecture.md. To find a thing one reads the function of its
  row, and to add one the section of its row. The files that are opened behind README are counted, and the lines read in them.
- Breaks: each function raises at its first line, in a copy of the tree. The test that its row names passes before and
  fails then.
- Additions: the toy algorithm, family, reward and environment of the pages are added to a copy as the pages say. The files
  that change are counted, and each is used: three in a run of one step, the family by reading a model's config.
"""

from __future__ import annotations

import ast
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import planted

MINUTES = 8.0
SOURCES = ("README.md", "docs/*.md", "jaxrl_post/**/*.py", "configs/**/*.py")
MOST_FILES, MOST_LINES, LIMIT_S = 2, 150, 600.0
ROW = re.compile(r"^\| ([^|]+) \| \[[^]]+\]\(([^)#]*)#([^)]+)\) \| `([^`:]+):([^`]+)` \| `([^`]+)` \|$", re.MULTILINE)
QUESTIONS = ("the loss of GRPO", "the decode step", "an algorithm", "a model family", "a reward", "an environment")
ONE_STEP = ("steps=1", "eval.prompts=0", "scheduler.prompts=2", "scheduler.group_size=2")
DEMO, SCORE = "configs/demo.py", "reward.functions=('reward.py:score',)"


def show(record) -> None:
    table = _section(record.root / "docs" / "architecture.md", "where-things-are")
    rows = ROW.findall(table)
    record.figure("questions_without_an_answer", sorted(set(QUESTIONS) - {row[0] for row in rows}), equals=[])
    readme = (record.root / "README.md").read_text()
    record.figure("readme_names_the_table", int("docs/architecture.md#where-things-are" in readme), at_least=1)
    for question, page, heading, file, symbol, _ in rows:
        if question.startswith("the "):
            node, opened = _function((record.root / file).read_text(), symbol), file
            lines = node.end_lineno - node.lineno + 1
        else:
            opened, lines = page, len(_section(record.root / "docs" / page, heading).splitlines())
        name = question.replace(" ", "_")
        record.figure(f"{name}.files", len({"architecture.md", opened}), at_most=MOST_FILES)
        record.figure(f"{name}.lines", len(table.splitlines()) + lines, at_most=MOST_LINES)
    with tempfile.TemporaryDirectory() as folder:
        copy = _copy(record.root, Path(folder) / "tree")
        for question, _, _, file, symbol, test in rows:
            name = question.replace(" ", "_")
            record.figure(f"{name}.test_passes", int(_passes(copy, test)), at_least=1)
            whole = (copy / file).read_text()
            (copy / file).write_text(_broken(whole, symbol))
            record.figure(f"{name}.test_of_the_broken_one_passes", int(_passes(copy, test)), equals=0)
            (copy / file).write_text(whole)
        _additions(record, copy, Path(folder))


def _section(page: Path, heading: str) -> str:
    """Returns a section of a page, its subsections included. `heading`: as a link names it."""
    lines = page.read_text().splitlines()
    for first, line in enumerate(lines):
        level, _, title = line.partition(" ")
        if set(level) == {"#"} and re.sub(r"[^\w -]", "", title.lower()).replace(" ", "-") == heading:
            ends = (n for n in range(first + 1, len(lines)) if re.match(rf"#{{1,{len(level)}}} ", lines[n]))
            return "\n".join(lines[first : next(ends, len(lines))])
    raise LookupError(f"{page} has no section #{heading}")


def _function(source: str, symbol: str) -> ast.FunctionDef:
    (found,) = [one for one in ast.parse(source).body if isinstance(one, ast.FunctionDef) and one.name == symbol]
    return found


def _broken(source: str, symbol: str) -> str:
    """Returns the source in which the function raises before its first statement."""
    body = _function(source, symbol).body
    first = body[1] if ast.get_docstring(_function(source, symbol)) else body[0]
    lines = source.splitlines(keepends=True)
    lines.insert(first.lineno - 1, f'{" " * first.col_offset}raise RuntimeError("broken by first-reading")\n')
    return "".join(lines)


def _copy(root: Path, copy: Path) -> Path:
    """Copies what git would commit into a repository of its own."""
    for name in planted.listed(root):
        (copy / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(root / name, copy / name)
    for command in (["init", "-q"], ["add", "-A"]):
        subprocess.run(["git", *command], cwd=copy, check=True)
    return copy


def _run(copy: Path, *command: str) -> subprocess.CompletedProcess:
    return subprocess.run(
        [sys.executable, *command],
        cwd=copy,
        env={**os.environ, "PYTHONPATH": str(copy), "JAX_PLATFORMS": "cpu"},
        text=True,
        capture_output=True,
        timeout=LIMIT_S,
    )


def _passes(copy: Path, test: str) -> bool:
    return not _run(
        copy, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", "-p", "no:xdist", f"tests/{test}"
    ).returncode


# ---- what the pages add


def _additions(record, copy: Path, folder: Path) -> None:
    rows = folder / "rows.jsonl"
    rows.write_text("".join(json.dumps({"prompt": f"{n},{n}", "answer": str(n)}) + "\n" for n in range(10, 20)))
    walk = "configs/demo/grid_world.py", "environment.name=doubling.py:Doubling", f"data.train={rows}", "data.size=4096"
    for name, page, heading, add, use in (
        (
            "algorithm",
            "contributing.md",
            "a-loss",
            _algorithm,
            _trains(DEMO, "eval.every=0", "algorithm.loss_mode=reinforce"),
        ),
        ("family", "contributing.md", "a-model-family", _family, _reads(folder / "config.json")),
        ("reward", "data_and_rewards.md", "reward-functions", _file("reward.py"), _trains(DEMO, "eval.every=0", SCORE)),
        ("environment", "environments.md", "your-own", _file("doubling.py"), _trains(*walk)),
    ):
        block = re.search(r"```python\n(.*?)```", _section(record.root / "docs" / page, heading), re.DOTALL)[1]
        add(copy, block)
        changed = subprocess.run(["git", "status", "--porcelain"], cwd=copy, text=True, capture_output=True).stdout
        touched = [line[3:] for line in changed.splitlines() if line[1] != " "]
        record.figure(f"added.{name}.files", touched)
        record.figure(f"added.{name}.num_files", len(touched), at_least=1, at_most=MOST_FILES)
        done = _run(copy, *use)
        record.figure(f"added.{name}.said", (done.stdout + done.stderr).strip().splitlines()[-1:])
        record.figure(f"added.{name}.exit_code", done.returncode, equals=0)
        subprocess.run(["git", "add", "-A"], cwd=copy, check=True)


def _algorithm(copy: Path, block: str) -> None:
    """Puts the loss into losses.py and its name into the schema."""
    losses, schema = copy / "jaxrl_post/algorithms/losses.py", copy / "jaxrl_post/config/training.py"
    losses.write_text(losses.read_text() + "\n\n" + _defined(block, "losses"))
    schema.write_text(schema.read_text().replace('"vanilla|clip_cov', '"vanilla|reinforce|clip_cov', 1))


def _family(copy: Path, block: str) -> None:
    families = copy / "jaxrl_post/models/families.py"
    families.write_text(families.read_text() + "\n" + _defined(block, "families"))


def _defined(block: str, module: str) -> str:
    """Returns what a page's block defines and registers, as the module itself writes it: no imports, no checks of the page."""
    kept = []
    for node in ast.parse(block).body:
        text = ast.unparse(node).replace(f"{module}.", "")
        if isinstance(node, ast.FunctionDef | ast.AugAssign | ast.Assign) and "given" not in text:
            kept.append(text)
    return "\n".join(kept) + "\n"


def _file(name: str):
    return lambda copy, block: (copy / name).write_text(block)


def _trains(config: str, *options: str) -> list[str]:
    """Returns the command of a run of one step."""
    return ["-m", "jaxrl_post.main", f"--config={config}", *(f"--config.{one}" for one in (*ONE_STEP, *options))]


def _reads(file: Path) -> list[str]:
    """Returns the command that reads a model's config of the toy family."""
    given = {"architectures": ["MyForCausalLM"], "vocab_size": 100, "hidden_size": 32, "num_hidden_layers": 2}
    file.write_text(json.dumps(given | {"num_attention_heads": 4, "intermediate_size": 64}))
    check = "from pathlib import Path; from jaxrl_post.models import families; "
    return ["-c", f"{check}print(families.read(Path({str(file)!r})).qk_norm)"]
