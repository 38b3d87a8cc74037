"""Continuous integration takes half an hour: `.ci/run` in a fresh clone with nothing compiled before, linters included.

Each run clones the project at its present commit into a temporary folder and makes the environments there. What follows is
measured: `.ci/run` whole, whose compilation cache is the clone's own and empty. Its seconds and CPU seconds are medians over
`--runs=` runs, 3 if nothing is said. The table by file and by test is that of the median run. Seconds count on two idle
cores. Needs a package index, or what pip is told to use in its place.
"""

from __future__ import annotations

import json
import os
import resource
import subprocess
import tempfile
import time
from pathlib import Path

MINUTES = 150.0
RUNS = 3
SECONDS, CPU_SECONDS = 2700.0, 4600.0
AIM_S = 1800.0
LIMIT_S = 7200
STAMPS = (".venv/installed.stamp", ".venv-lint/installed.stamp")
SETTINGS = (
    "PYTHON",
    "PYTEST",
    "VIRTUAL_ENV",
    "MAKE",
    "JAX",
    "XLA",
)  # what the caller's shell says is not for the clone


def show(record) -> None:
    env = {name: value for name, value in os.environ.items() if not name.startswith(SETTINGS)}
    env["JAXRL_DATA"] = str(record.data())
    count = int(record.options.get("runs", RUNS))
    runs = [record.cached(f"run_{number}", lambda: _run(record.root, env)) for number in range(count)]
    record.figure("num_runs", count, at_least=RUNS)
    record.figure("exit_codes", [run["exit_code"] for run in runs], equals=[0] * count)
    for what, most in (("seconds", SECONDS), ("cpu_s", CPU_SECONDS)):
        values = sorted(run[what] for run in runs)
        record.figure(f"{what}.of_each_run", values)
        record.figure(f"{what}.median", values[count // 2], at_most=most)
    middle = sorted(runs, key=lambda run: run["seconds"])[count // 2]
    record.figure("seconds_over_the_aim", round(middle["seconds"] / AIM_S, 3))
    record.figure("num_files", len(middle["table"]["files"]) - 2, at_least=100)
    record.figure("num_tests", middle["table"]["files"]["sum"]["tests"], at_least=1000)
    record.figure("compile_s", middle["table"]["files"]["sum"]["compile_s"])
    for kind in ("files", "tests"):
        for name, row in middle["table"][kind].items():
            record.figure(f"{kind}.{name}", {key: round(value, 2) for key, value in row.items()})


def _run(root: Path, env: dict[str, str]) -> dict:
    """One run in a clone of its own: its exit code, seconds, CPU seconds and table."""
    with tempfile.TemporaryDirectory() as folder:
        clone = Path(folder) / "project"
        subprocess.run(["git", "clone", "--quiet", str(root), str(clone)], check=True)
        subprocess.run(["make", *STAMPS], cwd=clone, env=env, check=True, stdout=subprocess.DEVNULL, timeout=LIMIT_S)
        begun, before = time.monotonic(), resource.getrusage(resource.RUSAGE_CHILDREN)
        done = subprocess.run([".ci/run"], cwd=clone, env=env, capture_output=True, text=True, timeout=LIMIT_S)
        seconds, after = time.monotonic() - begun, resource.getrusage(resource.RUSAGE_CHILDREN)
        if done.returncode:
            print((done.stdout + done.stderr)[-6000:])
        cpu_s = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
        table = json.loads((clone / ".cache" / "cpu_seconds.json").read_text())
    return {"exit_code": done.returncode, "seconds": round(seconds, 1), "cpu_s": round(cpu_s, 1), "table": table}
