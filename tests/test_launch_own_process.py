"""Freed blocks of a few MiB go back to the system; without the setting they stay (which is why there is one)."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
# A freed block of 30 MiB raises glibc's own threshold; then every other one of 64 blocks of 8 MiB is freed.
CODE = """
import gc, sys
import numpy as np
from jaxrl_post.launch import own_process
from jaxrl_post.launch.plan import memory_plan
if sys.argv[1] == "set" and not own_process.return_large_blocks():
    sys.exit(3)
np.ones(30 << 20, np.uint8)
blocks = [np.ones(8 << 20, np.uint8) for _ in range(64)]
before = memory_plan.resident()
del blocks[::2]
gc.collect()
print((before - memory_plan.resident()) >> 20)
"""


@pytest.mark.parametrize("way", ["set", "unset"])
def test_freed_blocks_go_back(way):
    if not Path("/proc/self/status").is_file():
        pytest.skip("the system does not say what a process holds")
    done = subprocess.run(
        [sys.executable, "-c", CODE, way],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=120,
        env={key: value for key, value in os.environ.items() if not key.startswith("MALLOC_")},
    )
    if done.returncode == 3:
        pytest.skip("the C library has no such setting")
    assert done.returncode == 0, done.stderr
    freed = int(done.stdout)
    assert freed >= 240 if way == "set" else freed < 128


SMALL = """
import numpy as np
from jaxrl_post.launch import own_process
from jaxrl_post.launch.plan import memory_plan
blocks = [np.ones(100 << 10, np.uint8) for _ in range(2000)]
pin = blocks[-1]
del blocks
held = memory_plan.resident()
if not own_process.give_back():
    raise SystemExit(3)
print((held - memory_plan.resident()) >> 20)
"""


def test_small_freed_blocks_go_back_when_asked_for():
    if not Path("/proc/self/status").is_file():
        pytest.skip("the system does not say what a process holds")
    done = subprocess.run(
        [sys.executable, "-c", SMALL],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=120,
        env={key: value for key, value in os.environ.items() if not key.startswith("MALLOC_")},
    )
    if done.returncode == 3:
        pytest.skip("the C library has no such call")
    assert done.returncode == 0 and int(done.stdout) >= 150, done.stderr
