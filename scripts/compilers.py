"""The environment of the compile tier: the vendors' compilers, apart from what a run installs."""

from __future__ import annotations

import subprocess
from pathlib import Path

from record import Missing


def python(root: Path, show: str) -> Path:
    """Makes the environment where it is missing, and returns its Python.

    Raises:
      Missing: it cannot be made, with what `make` said last.
    """
    made = subprocess.run(["make", ".venv-aot/installed.stamp"], cwd=root, text=True, capture_output=True)
    if made.returncode:
        said = (made.stdout + made.stderr)[-2000:]
        raise Missing(f"{show}: the environment of the compile tier was not made: {said}")
    return root / ".venv-aot" / "bin" / "python"
