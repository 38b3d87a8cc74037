"""The compile tier: the vendors' compilers over production shapes, without their devices.

`make test-compile` runs it in an environment of its own that holds them (extras aot-tpu and aot-cuda). `make test` does
not run it. Every test adds rows to one table, program by target. The table is printed at the end and written with
--table=FILE.
"""

from __future__ import annotations

import importlib.util
import json
import os
import sys
from pathlib import Path

import pytest

COMPILERS = ("libtpu", "jax_plugins.xla_cuda13")
COLUMNS = (
    "program",
    "target",
    "seconds",
    "temp_mib",
    "temp_bound_mib",
    "total_mib",
    "hbm_mib",
    "registers",
    "spill_bytes",
)

# Before anything imports jax. "cpu": with "cuda" the plugin looks for cuDNN, which compiling does not need. A cache would
# answer for the compiler.
os.environ.pop("JAX_COMPILATION_CACHE_DIR", None)
os.environ |= {
    "JAX_PLATFORMS": "cpu",
    "TPU_SKIP_MDS_QUERY": "1",
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
    "TPU_ACCELERATOR_TYPE": "v5litepod-4",
    "TPU_WORKER_HOSTNAMES": "localhost",
}
sys.path.insert(0, str(Path(__file__).resolve().parent))


def pytest_addoption(parser) -> None:
    parser.addoption("--table", help="file for the table, JSON")


def pytest_configure(config) -> None:
    config.addinivalue_line("markers", "timed: its CPU seconds have a bound; scripts/shows/compile.py runs it alone")
    missing = [name for name in COMPILERS if not _is_there(name)]
    if missing:
        raise pytest.UsageError(
            f"the compile tier needs {' and '.join(missing)}: `make test-compile` makes an environment that has them"
        )


def _is_there(name: str) -> bool:
    try:
        return importlib.util.find_spec(name) is not None
    except ModuleNotFoundError:
        return False


def pytest_collection_modifyitems(items) -> None:
    """Runs the longest tests first (train steps, row programs, kernels), so that the workers end together."""
    items.reverse()


@pytest.fixture
def table(request):
    """Returns `table(program, target, **figures)`, which adds a row."""

    def add(program: str, target: str, **figures) -> None:
        request.node.user_properties.append(("row", {"program": program, "target": target, **figures}))

    return add


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item, call):
    report = yield
    if report.when == "call" and report.failed:
        report.user_properties.append(("row", {"program": item.name, "target": "", "failed": True}))
    return report


def pytest_runtest_logreport(report) -> None:
    if report.when == "call":
        ROWS.extend(row for name, row in report.user_properties if name == "row")


ROWS: list[dict] = []


def pytest_terminal_summary(terminalreporter, config) -> None:
    if not ROWS or hasattr(config, "workerinput"):
        return
    rows = sorted(ROWS, key=lambda row: (row["program"], row["target"]))
    cells = [COLUMNS, *([_short(row.get(name, "")) for name in COLUMNS] for row in rows)]
    widths = [max(len(line[column]) for line in cells) for column in range(len(COLUMNS))]
    terminalreporter.section("programs by target")
    for line in cells:
        terminalreporter.write_line("  ".join(cell.ljust(width) for cell, width in zip(line, widths)).rstrip())
    if config.getoption("--table"):
        Path(config.getoption("--table")).write_text(json.dumps(rows, indent=1) + "\n")


def _short(value) -> str:
    return f"{value:.1f}" if isinstance(value, float) else str(value)
