"""Before anything imports jax: CPU, eight forced host devices, one compilation cache; annotations checked by beartype.

A variable that is already set wins, so `JAX_PLATFORMS=cuda pytest tests/test_kernels_x.py` does what it says.
"""

from __future__ import annotations

import gc
import os
import sys
from pathlib import Path

import array_annotations
import hypothesis
import pytest
import shared_programs

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "scripts"))  # whose modules some tests import
pytest_plugins = ["cpu_seconds", "workers"]
MISSING = "real inputs are missing"
LONG = (
    "test_main",
    "test_engine",
    "test_trainer",
    "test_sim_twin",
    "test_kernels",
    "test_models",
)  # files to begin with

_COUNT = "--xla_force_host_platform_device_count"
if _COUNT not in os.environ.get("XLA_FLAGS", ""):
    os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {_COUNT}=8".strip()
os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", str(ROOT / ".cache" / "jax"))
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0.2")

array_annotations.install("jaxrl_post")

# Tracing makes millions of objects that live on: to look through them again and again took 8 % of the CPU seconds.
gc.set_threshold(100_000, 50, 100)

# The same examples on every machine, however slow it is.
hypothesis.settings.register_profile("house", derandomize=True, deadline=None)
hypothesis.settings.load_profile("house")


def pytest_collection_modifyitems(items) -> None:
    """Long files first, so that workers end at about the same time; files stay whole."""
    items.sort(key=lambda item: not item.path.name.startswith(LONG))


def pytest_collection_finish(session) -> None:
    shared_programs.share()


@pytest.fixture(scope="module")
def quick_compilation():
    """Programs are compiled without most optimizations, in half the time; those of children too.

    For files whose tests compare no bits of compiled arithmetic, or the bits of programs that are the same. The second
    tier finds them in the cache of the first. Engines of the other files, and all shows, are compiled as users do.
    """
    import jax

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("JAX_DISABLE_MOST_OPTIMIZATIONS", "1")
        jax.config.update("jax_disable_most_optimizations", True)
        yield
        jax.config.update("jax_disable_most_optimizations", False)
        jax.clear_caches()  # nothing of it is left for the next file


@pytest.fixture(scope="session")
def data_dir() -> Path:
    """The folder of real inputs: JAXRL_DATA, else ../shared/data beside the project. Without it the test is
    skipped; with JAXRL_REQUIRE_DATA set it fails."""
    folder = Path(os.environ.get("JAXRL_DATA", ROOT.parent / "shared" / "data"))
    if not folder.is_dir():
        end = pytest.fail if os.environ.get("JAXRL_REQUIRE_DATA") else pytest.skip
        end(f"{MISSING}: {folder} is no folder (set JAXRL_DATA)")
    return folder


def pytest_terminal_summary(terminalreporter) -> None:
    skipped = [report for report in terminalreporter.getreports("skipped") if MISSING in str(report.longrepr)]
    if skipped:
        terminalreporter.section("REAL INPUTS ARE MISSING", "!", red=True, bold=True)
        terminalreporter.write_line(
            f"{len(skipped)} tests of real inputs (TinyStories, GSM8K, MBPP, HumanEval) did not run: set "
            "JAXRL_DATA to the folder that holds them.",
            red=True,
            bold=True,
        )
