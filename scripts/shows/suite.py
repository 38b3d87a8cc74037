"""The whole first tier of tests runs within minutes on two cores, from a fresh clone with nothing compiled before.

Clones the project at its present commit into a temporary folder and makes the environment there. Runs `make test`,
whose compilation cache lies in the clone and is empty. Writes the number of tests, the seconds, and the CPU seconds in
all and by file, as the table at the end of the run says. Seconds count on two idle cores. CPU seconds hold elsewhere
too, so one of the two bounds has to hold. Needs a package index, or what pip is told to use in its place.
"""

from __future__ import annotations

import os
import re
import subprocess
import tempfile
import time
from pathlib import Path

MINUTES = 12.0
SECONDS, CPU_SECONDS = 480.0, 900.0
LIMIT_S = 3600
SETTINGS = (
    "PYTHON",
    "PYTEST",
    "VIRTUAL_ENV",
    "MAKE",
    "JAX",
    "XLA",
)  # what the caller's shell says is not for the clone
ROW = re.compile(r"^(\S+\.py|\(start, imports and collection\)|sum)\s+(?:(\d+)\s+)?(\d+\.\d)$", re.MULTILINE)
ENDS = re.compile(r"(\d+) (passed|failed|skipped|errors?)\b")


def show(record) -> None:
    with tempfile.TemporaryDirectory() as folder:
        clone = Path(folder) / "project"
        subprocess.run(["git", "clone", "--quiet", str(record.root), str(clone)], check=True)
        env = {name: value for name, value in os.environ.items() if not name.startswith(SETTINGS)}
        env["JAXRL_DATA"] = str(record.data())
        _make(clone, env, ".venv/installed.stamp", record, "environment_s")
        said = _make(clone, env, "test", record, "test_s")
    rows = {name: (int(tests or 0), float(seconds)) for name, tests, seconds in ROW.findall(said)}
    counts = {what.rstrip("s"): int(count) for count, what in ENDS.findall(said.strip().splitlines()[-1])}
    record.figure("num_tests", rows["sum"][0], at_least=1000)
    record.figure("num_passed", counts.get("passed", 0))
    record.figure("num_skipped", counts.get("skipped", 0))
    record.figure("num_files", sum(name.endswith(".py") for name in rows), at_least=100)
    record.figure("cpu_s", rows["sum"][1])
    record.figure(
        "least_of_both_over_bound",
        round(min(record.figures["test_s"] / SECONDS, rows["sum"][1] / CPU_SECONDS), 3),
        at_most=1.0,
    )
    for name, (_, seconds) in rows.items():
        if name != "sum":
            record.figure(f"cpu_s.{Path(name).stem if name.endswith('.py') else 'outside_of_tests'}", seconds)


def _make(clone: Path, env: dict, target: str, record, figure: str) -> str:
    """Runs make there, writes its seconds and exit code, and returns what it said."""
    start = time.monotonic()
    done = subprocess.run(["make", target], cwd=clone, env=env, capture_output=True, text=True, timeout=LIMIT_S)
    record.figure(figure, round(time.monotonic() - start, 1))
    record.figure(figure.removesuffix("_s") + "_exit_code", done.returncode, equals=0)
    if done.returncode:
        print((done.stdout + done.stderr)[-6000:])
    return done.stdout
