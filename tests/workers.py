"""A pytest plugin that tells the most memory each pytest-xdist worker held, and how a worker ended that died.

Every report carries the most memory of its process so far, so that a worker that was killed has told its own. Memory of
children is not in it. A worker that the kernel killed for memory ends by SIGKILL, one that broke a rule of its own
memory by SIGSEGV or SIGABRT, and one whose test took too long with exit status 1.
"""

from __future__ import annotations

import resource
import signal
import subprocess

import pytest

KEY = "peak_kib"  # in a report
WAIT_S = 10.0  # for a worker whose pipe is closed


class Workers:
    """Counts in every process; prints in the one that has a terminal."""

    def __init__(self):
        self.peaks: dict[str, int] = {}  # KiB by worker
        self.ends: dict[str, str] = {}  # of workers that died

    @pytest.hookimpl(hookwrapper=True)
    def pytest_runtest_makereport(self):
        outcome = yield
        setattr(outcome.get_result(), KEY, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)

    def pytest_runtest_logreport(self, report):
        """The report of a crashed worker is the controller's own and carries no peak."""
        name = getattr(report, "worker_id", "this process")
        if hasattr(report, KEY):
            self.peaks[name] = getattr(report, KEY)

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node, error):
        if error:
            self.ends[node.gateway.id] = ended(node.gateway._io.popen)

    def pytest_terminal_summary(self, terminalreporter):
        if not self.peaks:
            return
        terminalreporter.section("Most memory of each worker")
        for name in sorted({*self.peaks, *self.ends}):
            end = f", {self.ends[name]}" if name in self.ends else ""
            terminalreporter.write_line(f"{name}: {self.peaks.get(name, 0) / 2**20:.1f} GiB{end}")


def ended(process: subprocess.Popen) -> str:
    """Returns how a process ended that has closed its pipe."""
    try:
        status = process.wait(WAIT_S)
    except subprocess.TimeoutExpired:
        return f"it closed its pipe and still ran after {WAIT_S:.0f} s"
    return f"ended by {signal.Signals(-status).name}" if status < 0 else f"ended with exit status {status}"


def pytest_configure(config):
    config.pluginmanager.register(Workers(), "memory and ends of workers")
