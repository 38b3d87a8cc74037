"""Shows what the project promises: runs it, prints each figure beside its bound, exits 1 where a bound is missed.

- `python scripts/show.py` lists the shows with their expected minutes.
- `python scripts/show.py NAME` runs one show and writes scripts/results/NAME.json.
- `python scripts/show.py NAME --arms=A,B` runs some arms of a show that has arms, and writes no result.
- `python scripts/show.py --all` runs every show in a process of its own, and prints a summary (make show).
- `python scripts/show.py --stale` lists the results whose code has changed since they were written.

A show is a file scripts/shows/NAME.py, with underscores for hyphens, and one at the end where Python's library has a module
NAME. It imports modules of the project, of scripts/ and of tests/. Its docstring's first line says what is shown. Its constant
`MINUTES` is the time expected on 2 cores, and `PLATFORM`, where it has one, is jax's unless JAX_PLATFORMS is set. Its function

    def show(record: Record) -> None

writes figures with `record.figure(key, value, at_least=..., at_most=..., equals=...)`. It hands work that is worth keeping
to `record.cached(key, work)`, finds real inputs with `record.data(...)` and runs commands of the project with
`record.run("-m", "jaxrl_post.main", ..., timeout_s=...)`. scripts/record.py documents them, scripts/sources.py which source
files a result vouches for.

Exit codes: 0 every bound holds, or a list was printed; 1 a bound is missed or the show failed; 2 no such show, or real
inputs are missing.
"""

from __future__ import annotations

import ast
import difflib
import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import sources
from record import ROOT, Missing, Record, write_json

FOLDER = Path(__file__).resolve().parent / "shows"
RESULTS = Path(__file__).resolve().parent / "results"
PACKAGE = ("jaxrl_post", "kernels")
PARTS = {"arms", "modes", "kinds"}  # options that choose a part of a show
RENAMED = {  # what a show was called -> what to write now
    "variants": "suite --arms=shown",
    "exact-scale": "suite --arms=exact-scale",
    "training-parity": "suite --arms=training-parity",
    "scheduler-properties": "suite --arms=scheduler",
    "spec-equality": "suite --arms=drafts",
    "held-out-faults": "suite --arms=drafts",
    "launch": "suite --arms=launch",
    "corruptions": "suite --arms=damage",
    "pipeline-resume": "faults --arms=points --modes=pipeline",
    "pipeline-faults": "faults --arms=points --modes=pipeline",
    "two-processes": "two-process-split",
    "draft-cost": "speculation",
    "where-it-wins": "auto",
    "faster-to-reward": "time-to-reward",
    "house": "weight",
}


def _root(folder: Path) -> Path:
    """The project whose scripts/shows the folder is."""
    return folder.resolve().parents[1]


def shows(folder: Path) -> dict[str, Path]:
    """Name -> file, sorted by name. A file that would hide a module of Python's library has an underscore at its end."""
    return {file.stem.rstrip("_").replace("_", "-"): file for file in sorted(folder.glob("*.py"))}


def headline(file: Path) -> tuple[float, str]:
    """Returns the expected minutes and what is shown, read without running the file."""
    minutes, docstring = _constant(file, "MINUTES"), ast.get_docstring(ast.parse(file.read_text(), str(file)))
    if not minutes or not docstring:
        raise ValueError(f"{file.name} must have a docstring and a constant MINUTES")
    return float(minutes), docstring.splitlines()[0]


def _constant(file: Path, name: str) -> Any:
    """Returns a constant of a show, read without running the file; None where it has none."""
    for node in ast.parse(file.read_text(), str(file)).body:
        if isinstance(node, ast.Assign) and [ast.unparse(target) for target in node.targets] == [name]:
            return ast.literal_eval(node.value)
    return None


def listing(known: dict[str, Path]) -> str:
    """Returns one line per show: name, expected minutes, what is shown."""
    width = max(map(len, known), default=0)
    lines = []
    for name, file in known.items():
        minutes, what = headline(file)
        lines.append(f"{name.ljust(width)}  {minutes:5.1f} min  {what}")
    return "\n".join(lines)


def run_one(name: str, file: Path, args: list[str], results: Path) -> int:
    """Runs a show, prints its table, writes its result and returns the exit code."""
    minutes, what = headline(file)
    print(f"{name}: {what} (expected: {minutes:g} minutes)", flush=True)
    record = Record(name, ["python", "scripts/show.py", name, *args], args, root=_root(file.parent), file=file)
    if platform := _constant(file, "PLATFORM"):
        os.environ.setdefault("JAX_PLATFORMS", platform)
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
    result = record.to_dict()
    names = [one for one in args if not one.startswith("--")]  # of parts, as `strangers` takes them
    if names or not PARTS.isdisjoint(record.options):
        print("a part of a show vouches for no whole: no result is written")
    else:
        results.mkdir(parents=True, exist_ok=True)
        write_json(results / f"{name}.json", result)
    on = f"commit {(result['commit'] or 'unknown')[:7]}{', uncommitted changes' if result['dirty'] else ''}"
    print(
        f"{record.table()}\n{name}: {'ok' if record.ok else 'FAIL'} ({on}; {len(result['sources'])} source files)",
        flush=True,
    )
    return 0 if record.ok else 1


def run_all(known: dict[str, Path], args: list[str]) -> int:
    """Runs every show in a process of its own. Returns 1 if one failed, else 2 if one lacked its inputs, else 0."""
    minutes = {name: headline(file)[0] for name, file in known.items()}
    print(f"{len(known)} shows, about {sum(minutes.values()):.0f} minutes: {', '.join(known)}", flush=True)
    codes = {name: subprocess.run([sys.executable, __file__, name, *args]).returncode for name in known}
    width = max(map(len, known), default=0)
    for name, code in codes.items():
        print(f"{name.ljust(width)}  {({0: 'ok', 2: 'inputs missing'}).get(code, 'FAIL')}")
    worst = set(codes.values())
    return 0 if worst <= {0} else 2 if worst <= {0, 2} else 1


def stale(known: dict[str, Path], results: Path, root: Path = ROOT) -> str:
    """Returns one line per show: how many of the files that its result vouches for have changed since it was written."""
    files = {name: results / f"{name}.json" for name in known}
    there = {name: json.loads(file.read_text()) for name, file in files.items() if file.is_file()}
    now = sources.hashes(root, {path for result in there.values() for path in result.get("sources", ())})
    width = max(map(len, known), default=0)
    return "\n".join(f"{name.ljust(width)}  {_age(root, there.get(name), now)}" for name in known)


def _age(root: Path, result: dict | None, now: dict[str, str]) -> str:
    if result is None:
        return "never run"
    on = f"{(result['commit'] or 'unknown')[:7]}{' with uncommitted changes' if result['dirty'] else ''}"
    if "sources" not in result:
        return _age_by_git(root, result["commit"], on)
    changed = [path for path, old in result["sources"].items() if now.get(path) != old]
    some = f": {', '.join(changed[:3])}{', ...' if len(changed) > 3 else ''}" if changed else ""
    return f"{len(changed)} of {len(result['sources'])} files changed since {on}{some}"


def _age_by_git(root: Path, commit: str | None, on: str) -> str:
    """For a result that lists no files: every change of the package counts."""

    def lines(*command: str) -> list[str] | None:
        done = subprocess.run(["git", *command, "--", *PACKAGE], cwd=root, text=True, capture_output=True)
        return None if done.returncode else done.stdout.split()

    commits = lines("rev-list", f"{commit}..HEAD") if commit else None
    changed = lines("diff", "--name-only", "--no-renames", commit) if commit else None
    if commits is None or changed is None:
        return f"lists no files, and git does not know its commit {on}"
    commits_since = f"{len(commits)} commit{'' if len(commits) == 1 else 's'} since {on}"
    return f"{len(changed)} files of {' and '.join(PACKAGE)} changed in {commits_since} (it lists no files)"


def main(argv: list[str], folder: Path = FOLDER, results: Path = RESULTS) -> int:
    known = shows(folder)
    if not argv:
        print(listing(known))
        return 0
    name, *args = argv
    if name == "--all":
        return run_all(known, args)
    if name == "--stale":
        print(stale(known, results, _root(folder)))
        return 0
    if name not in known and name in RENAMED:
        print(f"the show {name} is now: python scripts/show.py {RENAMED[name]}", file=sys.stderr)
        (name, *options) = RENAMED[name].split()
        args = [*options, *args]
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
    sys.path[:0] = [str(ROOT), str(ROOT / "scripts"), str(ROOT / "tests")]
    sys.exit(main(sys.argv[1:]))
