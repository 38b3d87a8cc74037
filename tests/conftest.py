"""Before anything imports jax: CPU, eight forced host devices, one compilation cache; annotations checked by beartype.

A variable that is already set wins, so `JAX_PLATFORMS=cuda pytest tests/test_kernels_x.py` does what it says.
"""

from __future__ import annotations

import os
from pathlib import Path

import hypothesis
import pytest
from jaxtyping import install_import_hook

ROOT = Path(__file__).resolve().parents[1]

_COUNT = "--xla_force_host_platform_device_count"
if _COUNT not in os.environ.get("XLA_FLAGS", ""):
    os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {_COUNT}=8".strip()
os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", str(ROOT / ".cache" / "jax"))
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0.2")

install_import_hook("jaxrl_post", "array_annotations.check")

# The same examples on every machine, however slow it is.
hypothesis.settings.register_profile("house", derandomize=True, deadline=None)
hypothesis.settings.load_profile("house")


@pytest.fixture(scope="session")
def data_dir() -> Path:
    """The folder of real inputs: JAXRL_DATA, else ../shared/data beside the project; without it the test is skipped."""
    folder = Path(os.environ.get("JAXRL_DATA", ROOT.parent / "shared" / "data"))
    if not folder.is_dir():
        pytest.skip(f"real inputs are missing: {folder} is no folder (set JAXRL_DATA)")
    return folder
