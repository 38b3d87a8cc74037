"""A pytest plugin about the processes of the suite: their memory, their mappings, and how one ended that died.

- Memory: every report carries the most memory of its process so far, so that a worker that was killed has told its own.
  Memory of children is not in it.
- Mappings: a program that XLA has compiled for a CPU holds three or more, and Linux allows a process 65,530
  (`vm.max_map_count`). Beyond that a compilation ends the process. So whatever holds programs forgets them after a file
  that leaves more than MOST_MAPS, and between two tests of a file above MAPS_LIMIT.
- End: a worker that the kernel killed for memory ends by SIGKILL, and one whose test took too long with exit status 1.
"""

from __future__ import annotations

import functools
import gc
import os
import resource
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import NamedTuple

import pytest
import shared_programs

KEY = "held"  # in a report
MOST_MAPS = int(os.environ.get("MOST_MAPS", "16000"))  # a file of whole runs may add twice as many
MAPS_LIMIT = 40_000  # within a file; Linux ends a process at 65,530
EVERY_S = 5.0  # counting takes some milliseconds
WAIT_S = 10.0  # for a worker whose pipe is closed


class Held(NamedTuple):
    """What a process held at most: memory in KiB, and mappings at the end of a file."""

    peak_kib: int = 0
    maps: int = 0


class Workers:
    """Counts in every process; prints in the one that has a terminal."""

    def __init__(self):
        self.maps = 0  # the most that this process had at the end of a file
        self._counted_s = 0.0
        self.held: dict[str, Held] = {}  # by worker
        self.ends: dict[str, str] = {}  # of workers that died

    @pytest.hookimpl(hookwrapper=True)
    def pytest_runtest_makereport(self):
        outcome = yield
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        setattr(outcome.get_result(), KEY, (peak, self.maps))

    @pytest.hookimpl(hookwrapper=True)
    def pytest_runtest_teardown(self, item, nextitem):
        ends = nextitem is None or nextitem.path != item.path
        if ends:  # before a fixture of the file forgets programs
            self.maps = max(self.maps, mappings())
        yield
        if "jax" in sys.modules and (ends or time.monotonic() - self._counted_s > EVERY_S):
            self._counted_s = time.monotonic()
            if mappings() > (MOST_MAPS if ends else MAPS_LIMIT):
                forget_programs(item.path.parent)

    def pytest_runtest_logreport(self, report):
        """The report of a crashed worker is the controller's own and carries nothing."""
        if hasattr(report, KEY):
            self.held[getattr(report, "worker_id", "this process")] = Held(*getattr(report, KEY))

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node, error):
        if error:
            self.ends[node.gateway.id] = ended(node.gateway._io.popen)

    def pytest_terminal_summary(self, terminalreporter):
        if not self.held:
            return
        terminalreporter.section("Most memory of each worker")
        for name in sorted({*self.held, *self.ends}):
            held = self.held.get(name, Held())
            end = f", {self.ends[name]}" if name in self.ends else ""
            terminalreporter.write_line(f"{name}: {held.peak_kib / 2**20:.1f} GiB, {held.maps:,} mappings{end}")


def forget_programs(tests: Path) -> None:
    """Drops what jax, the shared programs, cached functions of this folder's files and garbage hold."""
    shared_programs.forget()
    for module in list(sys.modules.values()):
        if Path(getattr(module, "__file__", None) or "/").parent == tests:
            for value in list(vars(module).values()):
                if isinstance(value, functools._lru_cache_wrapper):
                    value.cache_clear()
    sys.modules["jax"].clear_caches()
    gc.collect()


def mappings() -> int:
    """Returns how many mappings this process has; 0 where there is no /proc."""
    file = Path("/proc/self/maps")
    return file.read_bytes().count(b"\n") if file.exists() else 0


def ended(process: subprocess.Popen) -> str:
    """Returns how a process ended that has closed its pipe."""
    try:
        status = process.wait(WAIT_S)
    except subprocess.TimeoutExpired:
        return f"it closed its pipe and still ran after {WAIT_S:.0f} s"
    return f"ended by {signal.Signals(-status).name}" if status < 0 else f"ended with exit status {status}"


def pytest_configure(config):
    config.pluginmanager.register(Workers(), "memory, mappings and ends of workers")
