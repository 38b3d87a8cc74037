"""Seconds of an engine step by its number of rows: an input of the run, never measured inside it.

A measured table is read from a file that `scripts/bench.py cost` wrote. Without a file, an analytic estimate for the
device kind is used. Either table has a digest that is recorded with the run, so that decisions can be repeated.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from jaxrl_post.models import cache_kinds
from jaxrl_post.parallel import devices
from jaxrl_post.parallel.devices import Device
from jaxrl_post.ring import json_text
from jaxrl_post.ring.json_text import shown

OVERHEAD_S = 5e-5  # of a step
CPU_OVERHEAD_S = 3e-4  # rough: of a CPU only the ratios matter
SURE = 0.8  # share of the expected right drafts that counts, because rows cost for certain and drafts may be wrong
TRYING = 0.01  # largest share of the time for trials of drafts that do not seem to pay
_SHORTEST, _LONGEST = 1e-12, 1e9  # seconds in a file, beside 0
LASTING = 8  # dispatches over which the cost of starting to draft is spread


@dataclass(frozen=True)
class StepCost:
    """Seconds of a step at each measured number of rows; linear between them, and outside with the nearest slope.

    `drafting`: seconds that the drafter adds to a step. `opening`: seconds until drafting can begin after steps without
    it, because tables are built and texts are learned. `training`: seconds of a trained token on the learner's devices;
    0: not measured. `updating`: seconds of an optimizer step beside its tokens."""

    rows: tuple[int, ...]
    seconds: tuple[float, ...]
    source: str
    drafting: float = 0.0
    opening: float = 0.0
    training: float = 0.0
    updating: float = 0.0

    def __post_init__(self):
        if len(self.rows) != len(self.seconds) or not self.rows:
            raise ValueError(f"step-cost table {self.source}: {len(self.rows)} row counts, {len(self.seconds)} times")
        if sorted(set(self.rows)) != list(self.rows) or not all(0 < one < math.inf for one in self.seconds):
            raise ValueError(f"step-cost table {self.source}: row counts must ascend and times be positive")
        for name in ("drafting", "opening", "training", "updating"):
            if not 0 <= getattr(self, name) < math.inf:
                raise ValueError(
                    f"step-cost table {self.source}: the seconds of {name} are {getattr(self, name)} and must be at "
                    "least 0; 0 means that they were not measured"
                )

    def __call__(self, rows: int) -> float:
        """Returns the seconds of a step of `rows` rows."""
        if len(self.rows) == 1 or self.rows[0] <= rows <= self.rows[-1]:
            return float(np.interp(rows, self.rows, self.seconds))
        low, high = (0, 1) if rows < self.rows[0] else (-2, -1)
        slope = (self.seconds[high] - self.seconds[low]) / (self.rows[high] - self.rows[low])
        return max(self.seconds[low] + slope * (rows - self.rows[low]), min(self.seconds) / 1e3)

    @property
    def digest(self) -> str:
        """Returns 16 hex digits of SHA-256 over the numbers."""
        numbers = [
            self.rows,
            self.seconds,
            self.drafting,
            *([self.opening] if self.opening else []),
            *([0, self.training] if self.training else []),
            *([0, 0, self.updating] if self.updating else []),
        ]
        return hashlib.sha256(json.dumps(numbers).encode()).hexdigest()[:16]


@dataclass(frozen=True, kw_only=True)
class DecodeCost:
    """Seconds of one engine step of one replica: the slower of memory and arithmetic, plus fixed costs.

    max(weights_s + context * token_s, rows * row_s) + rows * request_s + fixed_s. A prefilled token costs prefill_s."""

    weights_s: float  # to read the weights once
    token_s: float  # to read one token's KV
    row_s: float  # arithmetic of one row
    fixed_s: float = 0.0
    request_s: float = 0.0
    prefill_s: float = 0.0
    source: str = "given"

    def __post_init__(self):
        numbers = [getattr(self, name) for name in _SECONDS]
        if min(numbers) < 0 or not self.weights_s + self.row_s + self.fixed_s > 0:
            raise ValueError(
                f"decode cost {self.source}: seconds must be at least 0, and a step must take some; got "
                f"{dict(zip(_SECONDS, numbers))}"
            )

    def __call__(self, rows: np.ndarray, context: np.ndarray) -> np.ndarray:
        """Returns the seconds of a step, elementwise: `rows` rows with `context` tokens of KV. Without a row: 0."""
        busy = (
            np.maximum(self.weights_s + context * self.token_s, rows * self.row_s)
            + rows * self.request_s
            + self.fixed_s
        )
        return np.where(rows > 0, busy, 0.0)

    @property
    def digest(self) -> str:
        """Returns 16 hex digits of SHA-256 over the numbers."""
        return hashlib.sha256(json.dumps([getattr(self, name) for name in _SECONDS]).encode()).hexdigest()[:16]


_SECONDS = ("weights_s", "token_s", "row_s", "fixed_s", "request_s", "prefill_s")


@dataclass(frozen=True, kw_only=True)
class TableCost:
    """A step-cost table used as a DecodeCost: a step costs by its rows alone. A prefilled token costs a row of the
    largest size."""

    table: StepCost

    def __call__(self, rows: np.ndarray, context: np.ndarray) -> np.ndarray:
        """Returns the seconds of a step, elementwise. Without a row: 0."""
        return np.array([self.table(count) if count > 0 else 0.0 for count in np.asarray(rows).tolist()])

    @property
    def prefill_s(self) -> float:
        """Returns the seconds of a prefilled token."""
        return self.table.seconds[-1] / self.table.rows[-1]

    @property
    def source(self) -> str:
        """Returns where the table comes from."""
        return self.table.source

    @property
    def digest(self) -> str:
        """Returns the table's digest."""
        return self.table.digest


@dataclass(frozen=True, kw_only=True)
class Shape:
    """What a model costs: parameters used for a token, parameters in all, and bytes of KV per token, in bf16."""

    active: float
    parameters: float
    kv_bytes: float


def _bf16_kv(layers: int, kv_heads: int) -> int:
    return 2 * cache_kinds.read((cache_kinds.Pages(kv_heads=kv_heads, head_dim=128),) * layers)


SHAPES = {  # the Qwen2.5 models' own configs
    "qwen2.5-7b": Shape(active=7.62e9, parameters=7.62e9, kv_bytes=_bf16_kv(28, 4)),
    "qwen2.5-14b": Shape(active=14.8e9, parameters=14.8e9, kv_bytes=_bf16_kv(48, 8)),
    "qwen2.5-32b": Shape(active=32.8e9, parameters=32.8e9, kv_bytes=_bf16_kv(64, 8)),
}


def decode(
    device_kind: str, shape: Shape, *, tensor: int = 1, efficiency: float = 0.6, per_collective_s: float = 0.0
) -> DecodeCost:
    """Returns the analytic cost of a replica of `tensor` devices: a lower bound.

    Weights and KV are read at memory bandwidth. Arithmetic runs at `efficiency` of the peak, prefill at half the peak.
    Each doubling of `tensor` adds `per_collective_s`."""
    one = devices.of(device_kind)
    return DecodeCost(
        weights_s=2 * shape.parameters / (one.bandwidth * tensor),
        token_s=shape.kv_bytes / (one.bandwidth * tensor),
        row_s=2 * shape.active / (one.flops * efficiency * tensor),
        fixed_s=_overhead(one) + per_collective_s * math.log2(tensor),
        prefill_s=2 * shape.active / (one.flops * 0.5 * tensor),
        source=f"analytic:{one.name} x {tensor}",
    )


def kv_tokens(device_kind: str, shape: Shape, *, tensor: int = 1, share: float = 0.9) -> int:
    """Returns the tokens of KV that fit beside the weights into `share` of the memory of `tensor` devices.

    Raises:
      ValueError: the weights alone do not fit.
    """
    one = devices.of(device_kind)
    room = one.memory * tensor * share
    free = room - 2 * shape.parameters
    if free < shape.kv_bytes:
        raise ValueError(
            f"{tensor} x {one.name} has {room:.3g} usable bytes, the weights need "
            f"{2 * shape.parameters:.3g}: use more devices a replica"
        )
    return int(free / shape.kv_bytes)


def _overhead(one: Device) -> float:
    return CPU_OVERHEAD_S if one.platform == "cpu" else OVERHEAD_S


def analytic(device_kind: str, parameters: int, bytes_per_parameter: float, sizes: Sequence[int]) -> StepCost:
    """Returns max(weight bytes / bandwidth, 2 * parameters * rows / peak) + overhead: a lower bound, not a forecast."""
    one = devices.of(device_kind)
    seconds = tuple(
        max(parameters * bytes_per_parameter / one.bandwidth, 2 * parameters * r / one.flops) + _overhead(one)
        for r in sorted(sizes)
    )
    return StepCost(tuple(sorted(sizes)), seconds, f"analytic:{one.name}")


def load(path: str) -> StepCost:
    """Reads a cost table from the JSON file that scripts/bench.py cost writes.

    Format: {"figures": {"step_s": {"64": 0.002, ...}, "drafting_s": 0.0002, "opening_s": 0.05, "train_token_s":
    0.0001, "train_step_s": 0.01}}.

    Raises:
      ValueError: the file does not exist or has another format.
    """
    file = Path(path)
    if not file.is_file():
        raise ValueError(f"engine.cost_table={path}: no such file; write one with scripts/bench.py cost --json {path}")
    where = f"engine.cost_table={path}"
    figures = json_text.read_object(file, where).get("figures")
    steps = figures.get("step_s") if isinstance(figures, dict) else None
    if not isinstance(steps, dict) or not steps:
        raise ValueError(f"{where}: expected figures.step_s with rows -> seconds, got {shown(steps)}")
    pairs = sorted((_rows(where, rows), _seconds(where, f"step_s.{rows}", steps[rows])) for rows in steps)
    names = ("drafting_s", "opening_s", "train_token_s", "train_step_s")
    others = [_seconds(where, name, figures.get(name, 0.0)) for name in names]
    return StepCost(tuple(r for r, _ in pairs), tuple(s for _, s in pairs), str(file), *others)


def _rows(where: str, text: str) -> int:
    """Returns a number of rows of a table's file."""
    if not (text.isascii() and text.isdigit() and len(text) < 10 and int(text) > 0):
        raise ValueError(f"{where}: expected figures.step_s with rows -> seconds, got rows {shown(text)}")
    return int(text)


def _seconds(where: str, name: str, value: object) -> float:
    """Returns seconds of a table's file. Their sign, and whether they are finite, is checked with the table."""
    wrong = isinstance(value, bool) or not isinstance(value, (int, float))
    if wrong or 0 < value < _SHORTEST or (abs(value) > _LONGEST and value not in (math.inf, -math.inf)):
        bounds = f"a number from {_SHORTEST:g} to {_LONGEST:g}"
        raise ValueError(f"{where}: figures.{name} must be seconds, {bounds}, got {shown(value)}")
    return float(value)


def best_size(
    cost: StepCost,
    sizes: Sequence[int],
    running: int,
    backlog: float,
    worth: Callable[[int], float],
    must_draft: bool = False,
    opening: float = 0.0,
) -> tuple[int, bool]:
    """Returns the size with the most useful rows a second, and whether to draft.

    A step has one row for each of `running` slots, then rows for `backlog` waiting rows. The rest may hold drafts:
    `worth(rows)` of them are expected to be right, and the share SURE of that counts. Sizes below `running` are not
    considered. Ties go to not drafting, then to the smaller size. `must_draft`: not drafting is not considered.
    `opening`: seconds that the start of drafting adds to a step."""
    fitting = [size for size in sorted(sizes) if size >= running] or [max(sizes)]

    def rate(choice: tuple[int, bool]) -> float:
        size, drafts = choice
        forced = min(size, running + backlog)
        if not drafts:
            return forced / cost(size)
        return (forced + SURE * worth(size - forced)) / (cost(size) + cost.drafting + opening)

    choices = [(size, drafts) for drafts in (False, True) for size in fitting if drafts or not must_draft]
    return max(choices, key=lambda choice: (rate(choice), not choice[1], -choice[0]))


def tries_apart(cost: StepCost) -> int:
    """Returns the steps between two trials of drafts, so that trials take at most the share TRYING of the time."""
    return math.ceil(cost.opening / (TRYING * min(cost.seconds)))
