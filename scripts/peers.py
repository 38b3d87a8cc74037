"""Environments of other projects below .cache/peers/, each made once with fixed versions, for shows that compare with them."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Sequence
from pathlib import Path

from record import Missing

PEFT = (
    "torch==2.13.0",
    "peft==0.21.2 transformers",
)  # torch, transformers and peft, for all shows of the environment "peft"


def environment(root: Path, peer: str, wanted: Sequence[str]) -> Path:
    """Returns the Python of a peer's environment. Makes it where it is not there or has other versions.

    Args:
      wanted: requirements, one line for each call of pip, since the order matters.
    """
    place = root / ".cache" / "peers" / peer
    python, done = place / "bin" / "python", place / "requirements.txt"
    text = "\n".join(wanted)
    if done.is_file() and done.read_text() == text:
        return python
    print(f"making {place} with {'; '.join(wanted)}", flush=True)
    found = subprocess.run(
        ["sh", "scripts/find_python.sh"], cwd=root, env={**os.environ, "WANTED": "3.11"}, text=True, capture_output=True
    )
    if found.returncode:
        raise Missing(f"{peer}: it needs Python 3.11, and none was found: {found.stderr.strip()}")
    subprocess.run([found.stdout.split()[1], "-m", "venv", "--clear", place], check=True)
    for line in wanted:
        subprocess.run([python, "-m", "pip", "install", "-q", "--disable-pip-version-check", *line.split()], check=True)
    done.write_text(text)
    return python
