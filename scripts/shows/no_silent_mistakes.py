"""Mistakes of data, rewards and resume are one sentence each, and nothing is lost or written over.

Each case of scripts/mistakes/*.py is made in an empty folder (scripts/refusals.py). Its command must end with the exit
code and the sentence of the case, without a traceback, and leave every file as it was. A control plants three faults in
the judging itself: a changed file, a left file and another sentence must each be noticed.
"""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys

MINUTES = 9.0
SOURCES = ("scripts/mistakes/*.py", "scripts/refusals.py", "jaxrl_post/**/*.py")
LEAST = 100  # cases


def show(record) -> None:
    cases = [case | {"name": f"{file.stem}: {case['name']}"} for file in _files(record) for case in _cases(file)]
    names = [case["name"] for case in cases]
    record.figure("cases", len(cases), at_least=LEAST)
    record.figure("names_that_come_twice", sorted({name for name in names if names.count(name) > 1}), equals=[])
    for file in _files(record):
        record.figure(f"cases.{file.stem}", len(_cases(file)), at_least=1)
    found = _judged(record, cases)
    failed = [f"{name}: {said}" for name, said in zip(names, found, strict=True) if said is not None]
    for line in failed:
        print(line, flush=True)
    record.figure("failures", failed, equals=[])
    record.figure("planted_faults_caught", _planted(record), equals=3)


def _files(record) -> list:
    return sorted(file for file in (record.root / "scripts" / "mistakes").glob("*.py") if not file.stem.startswith("_"))


def _cases(file) -> list[dict]:
    spec = importlib.util.spec_from_file_location(f"mistakes_{file.stem}", file)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.CASES


def _judged(record, cases: list[dict]) -> list[str | None]:
    """Returns, for each case, what is wrong with it, or None."""
    env = os.environ | {
        "PYTHONPATH": str(record.root),
        "PYTHONDONTWRITEBYTECODE": "1",
        "JAX_PLATFORMS": "cpu",
        "JAX_COMPILATION_CACHE_DIR": str(record.root / ".cache" / "jax"),
    }
    done = subprocess.run(
        [sys.executable, str(record.root / "scripts" / "refusals.py")],
        input="".join(json.dumps(case) + "\n" for case in cases),
        stdout=subprocess.PIPE,
        text=True,
        env=env,
        check=True,
    )
    return [json.loads(line) for line in done.stdout.splitlines()]


def _planted(record) -> int:
    """Counts the planted faults that are noticed: commands that do not keep the promise."""
    code = "import sys; {}; print('error: a sentence', file=sys.stderr); sys.exit(1)"
    faults = {
        "it changed or removed": (code.format("open('kept.txt', 'w')"), "a sentence"),
        "it left": (code.format("open('new.txt', 'w')"), "a sentence"),
        "it says": (code.format("pass"), "another sentence"),
    }
    cases = [
        {"name": word, "files": {"kept.txt": "kept"}, "argv": ["-c", program], "says": says}
        for word, (program, says) in faults.items()
    ]
    found = _judged(record, cases)
    return sum(str(said).startswith(word) for word, said in zip(faults, found, strict=True))
