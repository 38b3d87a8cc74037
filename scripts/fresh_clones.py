"""Clones of the project at its present commit, in which a command runs with nothing compiled before.

A clone lies in a temporary folder and makes its own environments there, from a package index. Settings of the caller's shell
do not reach it.
"""

from __future__ import annotations

import json
import os
import resource
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

LIMIT_S = 7200
SETTINGS = ("PYTHON", "PYTEST", "VIRTUAL_ENV", "MAKE", "JAX", "XLA")  # how variables begin that a clone does not get


class Ran(NamedTuple):
    """What a command said and took, in seconds of the clock and in CPU seconds of it and its children."""

    exit_code: int
    said: str
    seconds: float
    cpu_s: float


class Clone:
    """One clone in a folder. `data` is the folder of real inputs."""

    def __init__(self, folder: Path, data: Path):
        self._folder, self._table = folder, folder / ".cache" / "cpu_seconds.json"
        self._table.parent.mkdir()
        self._env = {name: value for name, value in os.environ.items() if not name.startswith(SETTINGS)}
        self._env |= {"JAXRL_DATA": str(data), "CPU_SECONDS_FILE": str(self._table)}

    def run(self, *command: str) -> Ran:
        """Runs a command there. Prints the end of its output if it fails."""
        begun, before = time.monotonic(), resource.getrusage(resource.RUSAGE_CHILDREN)
        done = subprocess.run(command, cwd=self._folder, env=self._env, capture_output=True, text=True, timeout=LIMIT_S)
        seconds, after = time.monotonic() - begun, resource.getrusage(resource.RUSAGE_CHILDREN)
        if done.returncode:
            print((done.stdout + done.stderr)[-6000:])
        cpu_s = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
        return Ran(done.returncode, done.stdout, round(seconds, 1), round(cpu_s, 1))

    def table(self) -> dict:
        """Returns the table of CPU seconds that the tests ended with: `files` and `tests` (tests/cpu_seconds.py)."""
        return json.loads(self._table.read_text())


@contextmanager
def clone(root: Path, data: Path) -> Iterator[Clone]:
    """Makes a clone of the project at `root`, and removes it at the end."""
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder) / "project"
        subprocess.run(["git", "clone", "--quiet", str(root), str(place)], check=True)
        yield Clone(place, data)
