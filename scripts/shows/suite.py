"""The whole first tier of tests runs within minutes on two cores, from a fresh clone with nothing compiled before.

Clones the project at its present commit into a temporary folder and makes the environment there. Runs `make test`,
whose compilation cache lies in the clone and is empty. Writes the number of tests, the seconds, and the CPU seconds in
all and by file, as the table at the end of the run says. Seconds count on two idle cores. CPU seconds hold elsewhere
too, so one of the two bounds has to hold. Needs a package index, or what pip is told to use in its place.
"""

from __future__ import annotations

import re
from pathlib import Path

import fresh_clones

MINUTES = 12.0
SECONDS, CPU_SECONDS = 480.0, 900.0
ENDS = re.compile(r"(\d+) (passed|failed|skipped|errors?)\b")


def show(record) -> None:
    with fresh_clones.clone(record.root, record.data()) as clone:
        for what, target in (("environment", ".venv/installed.stamp"), ("test", "test")):
            ran = clone.run("make", target)
            record.figure(f"{what}_s", ran.seconds)
            record.figure(f"{what}_exit_code", ran.exit_code, equals=0)
        rows = {name: (row["tests"], round(row["cpu_s"], 1)) for name, row in clone.table()["files"].items()}
    counts = {what.rstrip("s"): int(count) for count, what in ENDS.findall(ran.said.strip().splitlines()[-1])}
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
