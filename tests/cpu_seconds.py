"""A pytest plugin that counts CPU seconds by test file, of the process and of the children it waited for.

Every report of a phase (setup, call, teardown) carries the CPU seconds since the report before it, and the seconds that jax
spent in compilers meanwhile. Under xdist each worker counts its own, and the controller adds them up and prints one table.
What a worker spends outside of tests (start, imports, collection) is a row of its own. A child counts when it has been
waited for; what it compiles is in its CPU seconds alone. `CPU_SECONDS_FILE` names a file that keeps both tables as JSON.
"""

from __future__ import annotations

import json
import os
import sys
from collections import defaultdict
from pathlib import Path
from typing import NamedTuple

import pytest

OUTSIDE = "(start, imports and collection)"
DEAREST = int(os.environ.get("CPU_SECONDS_TESTS", "30"))  # tests in the second table
KEY = "cpu_seconds"  # in a report, and in what a worker hands over at its end
COMPILED = "/jax/core/compile/backend_compile_duration"  # jax's event: one program came from a compiler or its cache


class Spent(NamedTuple):
    """CPU seconds, and seconds of the clock in compilers."""

    cpu_s: float = 0.0
    compile_s: float = 0.0

    def plus(self, other) -> Spent:
        return Spent(*(mine + its for mine, its in zip(self, other, strict=True)))

    def minus(self, other) -> Spent:
        return Spent(*(mine - its for mine, its in zip(self, other, strict=True)))


class CpuSeconds:
    """Counts in every process; prints in the one that has a terminal."""

    def __init__(self, children: bool):
        self.children = children  # False in a controller, whose children are workers that count themselves
        self.last = self.outside = Spent()
        self.listens = False
        self.compile_s = 0.0
        self.tests: dict[str, Spent] = defaultdict(Spent)

    def lap(self) -> Spent:
        """Returns what was spent since the last lap, the first one since the process began."""
        if not self.listens and "jax" in sys.modules:
            sys.modules["jax"].monitoring.register_event_duration_secs_listener(self._heard)
            self.listens = True
        last, self.last = self.last, Spent(sum(os.times()[: 4 if self.children else 2]), self.compile_s)
        return self.last.minus(last)

    def _heard(self, event: str, seconds: float, **_: object) -> None:
        self.compile_s += seconds * (event == COMPILED)

    @pytest.hookimpl(hookwrapper=True)
    def pytest_runtest_protocol(self):
        self.outside = self.outside.plus(self.lap())
        yield

    @pytest.hookimpl(hookwrapper=True)
    def pytest_runtest_makereport(self):
        outcome = yield
        setattr(outcome.get_result(), KEY, list(self.lap()))

    def pytest_runtest_logreport(self, report):
        """Called in the worker and, with the same report, in the controller."""
        self.tests[report.nodeid] = self.tests[report.nodeid].plus(
            getattr(report, KEY, Spent())  # the report of a crashed worker carries none
        )

    def pytest_sessionfinish(self, session):
        self.outside = self.outside.plus(self.lap())
        if hasattr(session.config, "workeroutput"):
            session.config.workeroutput[KEY] = list(self.outside)

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node):
        self.outside = self.outside.plus(getattr(node, "workeroutput", {}).get(KEY, Spent()))

    def pytest_terminal_summary(self, terminalreporter):
        if not self.tests:
            return
        rows = self.rows()
        dearest = sorted(self.tests.items(), key=lambda row: -row[1].cpu_s)[:DEAREST]
        terminalreporter.section("CPU seconds by test file")
        width = max(len(name) for name, _, _ in rows)
        terminalreporter.write_line(f"{'file'.ljust(width)}  tests  CPU s  compile s")
        for name, count, spent in rows:
            terminalreporter.write_line(
                f"{name.ljust(width)}  {count or '':>5}  {spent.cpu_s:5.1f}  {spent.compile_s:9.1f}"
            )
        terminalreporter.section("Tests that take the most CPU seconds")
        for name, spent in dearest:
            terminalreporter.write_line(f"{spent.cpu_s:6.1f}  {name}")
        if "CPU_SECONDS_FILE" in os.environ:
            files = {name: {"tests": count, **spent._asdict()} for name, count, spent in rows}
            tests = {name: spent._asdict() for name, spent in dearest}
            Path(os.environ["CPU_SECONDS_FILE"]).write_text(json.dumps({"files": files, "tests": tests}, indent=1))

    def rows(self) -> list[tuple[str, int, Spent]]:
        """Returns name, number of tests and what was spent: one row per file, the most expensive first, and the sum."""
        counts: dict[str, int] = defaultdict(int)
        files: dict[str, Spent] = defaultdict(Spent)
        for name, spent in self.tests.items():
            file = name.partition("::")[0]
            counts[file] += 1
            files[file] = files[file].plus(spent)
        rows = [(file, counts[file], spent) for file, spent in files.items()]
        rows = [*sorted(rows, key=lambda row: -row[2].cpu_s), (OUTSIDE, 0, self.outside)]
        whole = Spent(*(sum(column) for column in zip(*(row[2] for row in rows), strict=True)))
        return [*rows, ("sum", sum(counts.values()), whole)]


def pytest_configure(config):
    controls = not hasattr(config, "workerinput") and config.getoption("tx", None)
    config.pluginmanager.register(CpuSeconds(children=not controls), "counter of CPU seconds")
