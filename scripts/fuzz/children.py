"""Runs cases in child processes and counts how they ended. A child that dies is replaced after the case that it was at.

    python scripts/fuzz/children.py KIND SEED FIRST COUNT

runs cases of one kind and prints every outcome that a reader must not have.
"""

from __future__ import annotations

import dataclasses
import json
import os
import queue
import subprocess
import sys
import tempfile
import threading
from dataclasses import dataclass, field
from pathlib import Path

HERE = Path(__file__).resolve().parent
START_S, CASE_S = 300.0, 20.0  # a child that says nothing for so long is ended
OUTCOMES = ("accepted", "refused", "TRACEBACK", "HANG", "MEMORY", "CRASH")
BAD = OUTCOMES[2:]


@dataclass(kw_only=True)
class Tally:
    """The outcomes of one kind. `bad`: its cases that are neither accepted nor refused in one sentence."""

    kind: str
    counts: dict[str, int] = field(default_factory=lambda: dict.fromkeys(OUTCOMES, 0))
    bad: list[dict] = field(default_factory=list)
    seconds: float = 0.0
    grown: int = 0

    def add(self, row: dict) -> None:
        self.counts[row["outcome"]] += 1
        self.seconds, self.grown = max(self.seconds, row["seconds"]), max(self.grown, row["grown"])
        if row["outcome"] in BAD:
            self.bad.append(row)


def run(kind: str, seed: int, first: int, count: int) -> Tally:
    """Runs cases `first` to `first + count` of a kind."""
    tally, at = Tally(kind=kind), first
    while at < first + count:
        at = _child(tally, seed, at, first + count - at)
    return tally


def _child(tally: Tally, seed: int, first: int, count: int) -> int:
    """Runs one child until it ends. Returns the next case."""
    case_s = 10 * CASE_S if tally.kind == "processes" else CASE_S
    env = os.environ | {"ARROW_DEFAULT_MEMORY_POOL": "system", "JAX_PLATFORMS": "cpu", "MALLOC_ARENA_MAX": "2"}
    lines: queue.Queue[str] = queue.Queue()
    with tempfile.TemporaryFile("w+", errors="replace") as said:
        process = subprocess.Popen(
            [sys.executable, str(HERE / "child.py"), tally.kind, *map(str, (seed, first, count))],
            cwd=HERE.parents[1],
            env=env,
            text=True,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=said,
        )
        reader = threading.Thread(target=lambda: ([lines.put(line) for line in process.stdout], lines.put("")))
        reader.start()
        at, begun, late = first, None, False
        try:
            while line := lines.get(timeout=case_s if begun or at > first else START_S):
                row = json.loads(line)
                if "outcome" in row:
                    tally.add(row)
                    at, begun = row["index"] + 1, None
                else:
                    begun = row
        except queue.Empty:
            late = True
        process.kill()
        process.wait()
        reader.join()
        process.stdout.close()
        said.seek(0)
        errors = said.read()[-600:]
    if begun is None and at < first + count:
        raise RuntimeError(f"fuzz {tally.kind}: the child ended between two cases, before case {at}: {errors}")
    if begun is not None:
        outcome = "HANG" if late else "MEMORY" if "memory allocation" in errors or "bad_alloc" in errors else "CRASH"
        tally.add(begun | {"outcome": outcome, "said": errors, "seconds": CASE_S if late else 0.0, "grown": 0})
        at = begun["index"] + 1
    return at


if __name__ == "__main__":
    found = run(sys.argv[1], *map(int, sys.argv[2:5]))
    for row in found.bad:
        print(json.dumps(row, indent=1))
    print(json.dumps(dataclasses.asdict(found) | {"bad": len(found.bad)}))
