"""What one engine step costs, by its number of rows: an input of the run, never a measurement inside it.

A measured table comes from a file that `scripts/bench.py cost` wrote; without one, an analytic estimate for the device kind
stands in. Either way it has a hash that is recorded with the run, so that a decision can be repeated.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

# peak FLOP/s of dense bf16 (f32 on CPU), memory bytes/s, seconds of overhead a step; vendor figures, but for cpu, where
# they are rough and only the ratios matter
DEVICES = {
    "cpu": (1e11, 2e10, 3e-4),
    "a100": (3.1e14, 2.0e12, 5e-5),
    "h100": (9.9e14, 3.35e12, 5e-5),
    "h200": (9.9e14, 4.8e12, 5e-5),
    "v5e": (1.97e14, 8.2e11, 5e-5),
    "v5p": (4.59e14, 2.76e12, 5e-5),
    "v6e": (9.18e14, 1.64e12, 5e-5),
}

SURE = 0.8  # of the right drafts that are expected: rows are paid for certainly, drafts prove right perhaps


@dataclass(frozen=True)
class StepCost:
    """Seconds of a step at each measured row count; between them linear, outside at the nearest slope. `drafting`: seconds
    that the drafter adds to a step."""

    rows: tuple[int, ...]
    seconds: tuple[float, ...]
    source: str
    drafting: float = 0.0

    def __post_init__(self):
        if len(self.rows) != len(self.seconds) or not self.rows:
            raise ValueError(f"step-cost table {self.source}: {len(self.rows)} row counts, {len(self.seconds)} times")
        if sorted(set(self.rows)) != list(self.rows) or min(self.seconds) <= 0:
            raise ValueError(f"step-cost table {self.source}: row counts must ascend and times be positive")

    def __call__(self, rows: int) -> float:
        """Seconds of a step of `rows` rows."""
        if len(self.rows) == 1 or self.rows[0] <= rows <= self.rows[-1]:
            return float(np.interp(rows, self.rows, self.seconds))
        low, high = (0, 1) if rows < self.rows[0] else (-2, -1)
        slope = (self.seconds[high] - self.seconds[low]) / (self.rows[high] - self.rows[low])
        return max(self.seconds[low] + slope * (rows - self.rows[low]), min(self.seconds) / 1e3)

    @property
    def digest(self) -> str:
        """Of the numbers: 16 hex digits of SHA-256."""
        return hashlib.sha256(json.dumps([self.rows, self.seconds, self.drafting]).encode()).hexdigest()[:16]


def analytic(device_kind: str, parameters: int, bytes_per_parameter: int, sizes: Sequence[int]) -> StepCost:
    """max(weight bytes / bandwidth, 2 * parameters * rows / peak) + overhead; a floor, not a forecast."""
    plain = device_kind.lower().replace(" lite", "e").replace(" ", "")
    kind = next((name for name in DEVICES if name in plain), None)
    if kind is None:
        raise ValueError(f"there is no analytic step-cost table for a {device_kind}, only for {', '.join(DEVICES)}: measure "
                         "one with scripts/bench.py cost and name its file in engine.cost_table")
    peak, bandwidth, overhead = DEVICES[kind]
    seconds = tuple(max(parameters * bytes_per_parameter / bandwidth, 2 * parameters * r / peak) + overhead
                    for r in sorted(sizes))
    return StepCost(tuple(sorted(sizes)), seconds, f"analytic:{kind}")


def load(path: str) -> StepCost:
    """Reads {"figures": {"step_s": {"64": 0.002, ...}, "drafting_s": 0.0002}}, as scripts/bench.py cost writes it."""
    file = Path(path)
    if not file.is_file():
        raise ValueError(f"engine.cost_table={path}: no such file; write one with scripts/bench.py cost --json {path}")
    try:
        figures: Mapping[str, Mapping[str, float]] = json.loads(file.read_text())["figures"]
        pairs = sorted((int(rows), float(seconds)) for rows, seconds in figures["step_s"].items())
        drafting = float(figures.get("drafting_s", 0.0))
    except (json.JSONDecodeError, KeyError, TypeError, AttributeError, ValueError) as error:
        raise ValueError(f"engine.cost_table={path}: expected figures.step_s with rows -> seconds, got {error!r}") from None
    return StepCost(tuple(r for r, _ in pairs), tuple(s for _, s in pairs), str(file), drafting)


def best_size(cost: StepCost, sizes: Sequence[int], running: int, backlog: float, worth: Callable[[int], float],
              must_draft: bool = False) -> tuple[int, bool]:
    """The size with the most useful rows a second, and whether to draft: of each step one row for each running slot, the
    next for `backlog` waiting rows, and the rest may hold drafts, of which `worth(rows)` are expected to prove right: of them
    SURE count.

    Sizes below `running` are out; ties go to not drafting, then to the smaller size. `must_draft`: not drafting is out."""
    fitting = [size for size in sorted(sizes) if size >= running] or [max(sizes)]

    def rate(choice: tuple[int, bool]) -> float:
        size, drafts = choice
        forced = min(size, running + backlog)
        return (forced + drafts * SURE * worth(size - forced)) / (cost(size) + drafts * cost.drafting)

    choices = [(size, drafts) for drafts in (False, True) for size in fitting if drafts or not must_draft]
    return max(choices, key=lambda choice: (rate(choice), not choice[1], -choice[0]))
