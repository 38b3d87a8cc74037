"""Continuous integration takes half an hour: `.ci/run` in a fresh clone with nothing compiled before, linters included.

Each run clones the project at its present commit into a temporary folder and makes the environments there. What follows is
measured: `.ci/run` whole, whose compilation cache is the clone's own and empty. Its seconds and CPU seconds are medians over
`--runs=` runs, 3 if nothing is said. The table by file and by test is that of the median run. Seconds count on two idle
cores. Needs a package index, or what pip is told to use in its place.
"""

from __future__ import annotations

import fresh_clones

MINUTES = 150.0
RUNS = 3
SECONDS, CPU_SECONDS = 2700.0, 4600.0
AIM_S = 1800.0
STAMPS = (".venv/installed.stamp", ".venv-lint/installed.stamp")


def show(record) -> None:
    data = record.data()
    count = int(record.options.get("runs", RUNS))
    runs = [record.cached(f"run_{number}", lambda: _run(record.root, data)) for number in range(count)]
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


def _run(root, data) -> dict:
    """One run in a clone of its own: its exit code, seconds, CPU seconds and table."""
    with fresh_clones.clone(root, data) as clone:
        if clone.run("make", *STAMPS).exit_code:
            raise RuntimeError("the environments of a fresh clone could not be made")
        ran = clone.run(".ci/run")
        return {"exit_code": ran.exit_code, "seconds": ran.seconds, "cpu_s": ran.cpu_s, "table": clone.table()}
