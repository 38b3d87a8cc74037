"""A pytest plugin that counts CPU seconds by test file, of the process and of the children it waited for.

Every report of a phase (setup, call, teardown) carries the CPU seconds since the report before it. Under xdist each
worker counts its own, and the controller adds them up and prints one table. What a worker spends outside of tests
(start, imports, collection) is a row of its own. A child counts when it has been waited for.
"""

from __future__ import annotations

import os
from collections import defaultdict

import pytest

OUTSIDE = "(start, imports and collection)"
DEAREST = int(os.environ.get("CPU_SECONDS_TESTS", "15"))  # tests in the second table
KEY = "cpu_seconds"  # in a report, and in what a worker hands over at its end


def spent(children: bool = True) -> float:
    """Returns the CPU seconds of this process so far, with those of the children it waited for."""
    return sum(os.times()[: 4 if children else 2])


class CpuSeconds:
    """Counts in every process; prints in the one that has a terminal."""

    def __init__(self, children: bool):
        self.children = children  # False in a controller, whose children are workers that count themselves
        self.last = 0.0
        self.outside = 0.0
        self.seconds: dict[str, float] = defaultdict(float)  # by test

    def lap(self) -> float:
        """Returns the CPU seconds since the last lap, the first one since the process began."""
        last, self.last = self.last, spent(self.children)
        return self.last - last

    @pytest.hookimpl(hookwrapper=True)
    def pytest_runtest_protocol(self):
        self.outside += self.lap()
        yield

    @pytest.hookimpl(hookwrapper=True)
    def pytest_runtest_makereport(self):
        outcome = yield
        setattr(outcome.get_result(), KEY, self.lap())

    def pytest_runtest_logreport(self, report):
        """Called in the worker and, with the same report, in the controller."""
        self.seconds[report.nodeid] += getattr(report, KEY, 0.0)  # the report of a crashed worker carries none

    def pytest_sessionfinish(self, session):
        self.outside += self.lap()
        if hasattr(session.config, "workeroutput"):
            session.config.workeroutput[KEY] = self.outside

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node):
        self.outside += getattr(node, "workeroutput", {}).get(KEY, 0.0)

    def pytest_terminal_summary(self, terminalreporter):
        if not self.seconds:
            return
        terminalreporter.section("CPU seconds by test file")
        for line in self.table():
            terminalreporter.write_line(line)
        terminalreporter.section("Tests that take the most CPU seconds")
        for name, seconds in sorted(self.seconds.items(), key=lambda row: -row[1])[:DEAREST]:
            terminalreporter.write_line(f"{seconds:6.1f}  {name}")

    def table(self) -> list[str]:
        """Returns one line per file, the most expensive first, and the sum."""
        files: dict[str, list[float]] = defaultdict(list)
        for name, seconds in self.seconds.items():
            files[name.partition("::")[0]].append(seconds)
        rows = [(file, len(seconds), sum(seconds)) for file, seconds in files.items()]
        rows = [*sorted(rows, key=lambda row: -row[2]), (OUTSIDE, 0, self.outside)]
        rows.append(("sum", sum(row[1] for row in rows), sum(row[2] for row in rows)))
        width = max(len(row[0]) for row in rows)
        return [
            f"{'file'.ljust(width)}  tests  CPU s",
            *(f"{file.ljust(width)}  {count or '':>5}  {seconds:5.1f}" for file, count, seconds in rows),
        ]


def pytest_configure(config):
    controls = not hasattr(config, "workerinput") and config.getoption("tx", None)
    config.pluginmanager.register(CpuSeconds(children=not controls), "counter of CPU seconds")
