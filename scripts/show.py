"""Shows what the project promises: runs the thing, prints figure and bound, exits 1 below the bound.

    python scripts/show.py               lists the shows with their expected minutes
    python scripts/show.py NAME          runs one; writes scripts/results/NAME.json
    python scripts/show.py --all         runs every one, each in its own process, and prints a summary (make show)

A show is a file scripts/shows/NAME.py (underscores for hyphens) with a docstring whose first line says what is shown,
a constant `MINUTES` (expected, on 2 cores), and a function

    def show(record: Record) -> None

which writes its figures with `record.figure(key, value, at_least=..., at_most=..., equals=...)`; finished seeds go
through `record.cached(key, work)`, real inputs through `record.data(...)`, commands of the project through
`record.run("-m", "jaxrl_post.main", ..., timeout_s=...)`. scripts/record.py documents them.

Exit codes: 0 every bound holds; 1 a bound is missed or the show failed; 2 no such show, or real inputs are missing.
"""

from __future__ import annotations

import ast
import difflib
import importlib.util
import subprocess
import sys
from pathlib import Path

from record import ROOT, Missing, Record, write_json

FOLDER = Path(__file__).resolve().parent / "shows"
RESULTS = Path(__file__).resolve().parent / "results"


def shows(folder: Path) -> dict[str, Path]:
    """Name -> file."""
    return {file.stem.replace("_", "-"): file for file in sorted(folder.glob("*.py"))}


def headline(file: Path) -> tuple[float, str]:
    """Expected minutes and what is shown, read without running the file."""
    source = ast.parse(file.read_text(), str(file))
    minutes = [
        ast.literal_eval(node.value)
        for node in source.body
        if isinstance(node, ast.Assign) and [ast.unparse(target) for target in node.targets] == ["MINUTES"]
    ]
    if not minutes or not ast.get_docstring(source):
        raise ValueError(f"{file.name} must have a docstring and a constant MINUTES")
    return float(minutes[0]), ast.get_docstring(source).splitlines()[0]


def listing(known: dict[str, Path]) -> str:
    width = max(map(len, known), default=0)
    lines = []
    for name, file in known.items():
        minutes, what = headline(file)
        lines.append(f"{name.ljust(width)}  {minutes:5.1f} min  {what}")
    return "\n".join(lines)


def run_one(name: str, file: Path, args: list[str], results: Path) -> int:
    """Runs a show, prints its table, writes its result; the exit code."""
    minutes, what = headline(file)
    print(f"{name}: {what} (expected: {minutes:g} minutes)", flush=True)
    record = Record(name, ["python", "scripts/show.py", name, *args], args)
    spec = importlib.util.spec_from_file_location(f"shows.{file.stem}", file)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    try:
        module.show(record)
    except Missing as missing:
        print(missing, file=sys.stderr)
        return 2
    if not record.bounds:
        raise ValueError(f"show {name} wrote no figure with a bound: it shows nothing")
    results.mkdir(parents=True, exist_ok=True)
    write_json(results / f"{name}.json", record.to_dict())
    print(f"{record.table()}\n{name}: {'ok' if record.ok else 'FAIL'}", flush=True)
    return 0 if record.ok else 1


def run_all(known: dict[str, Path], args: list[str]) -> int:
    """Every show in a process of its own; 1 when one failed, else 2 when one lacked its inputs, else 0."""
    minutes = {name: headline(file)[0] for name, file in known.items()}
    print(f"{len(known)} shows, about {sum(minutes.values()):.0f} minutes: {', '.join(known)}", flush=True)
    codes = {name: subprocess.run([sys.executable, __file__, name, *args]).returncode for name in known}
    width = max(map(len, known), default=0)
    for name, code in codes.items():
        print(f"{name.ljust(width)}  {({0: 'ok', 2: 'inputs missing'}).get(code, 'FAIL')}")
    worst = set(codes.values())
    return 0 if worst <= {0} else 2 if worst <= {0, 2} else 1


def main(argv: list[str], folder: Path = FOLDER, results: Path = RESULTS) -> int:
    known = shows(folder)
    if not argv:
        print(listing(known))
        return 0
    name, *args = argv
    if name == "--all":
        return run_all(known, args)
    if name not in known:
        near = difflib.get_close_matches(name, known, n=1)
        print(
            f"no show is called {name!r}"
            + (f"; nearest is {near[0]!r}" if near else f"; there are {', '.join(known)}"),
            file=sys.stderr,
        )
        return 2
    return run_one(name, known[name], args, results)


if __name__ == "__main__":
    sys.path.insert(0, str(ROOT))
    sys.exit(main(sys.argv[1:]))
