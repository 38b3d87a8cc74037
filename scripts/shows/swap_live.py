"""A swap in mid-generation costs no more than a copy: scripts/bench.py swap, with its bounds.

What keep, recompute and verify do to rollouts is in tests/test_engine_equality.py.
"""

from __future__ import annotations

import json
import tempfile
from pathlib import Path

MINUTES = 2.0
PLATFORM = "cpu"


def show(record) -> None:
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "swap.json"
        record.run("scripts/bench.py", "swap", "--json", file, timeout_s=600)
        bench = json.loads(file.read_text())
    for name, value in bench["figures"].items():
        bounds = {kind: bound for kind, bound in bench["bounds"].get(name, {}).items() if kind != "ok"}
        record.figure(f"bench_{name}", value, **bounds)
