"""metrics.jsonl, the file of a run's metrics: which of them were timed, how a row is written, and how all are read.

Metrics for which `is_timing` is true were measured on the machine. All other metrics are functions of config and code:
equal runs agree in them bit for bit. This module imports no jax.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path

from jaxrl_post.ring import json_text, written

_TIMED = ("timing_s/", "timing_per_token_ms/", "perf/", "memory/")


def is_timing(name: str) -> bool:
    """Returns whether a metric was timed or measured on the machine, so that equal runs differ in it."""
    return name.startswith(_TIMED)


def is_of_step(row: Mapping[str, float]) -> bool:
    """Returns whether a row is of an optimizer step. Others are of evaluations."""
    return "training/global_step" in row


def deterministic(row: Mapping[str, float]) -> dict[str, float]:
    """Returns the row without metrics that were timed."""
    return {name: value for name, value in row.items() if not is_timing(name)}


class Jsonl:
    """Writes metrics.jsonl: one object per row, "step" first, names sorted. Values that are not finite become null."""

    def __init__(self, path: str | Path):
        self._file = written.Log(path)

    def write(self, step: int, row: Mapping[str, float]) -> None:
        """Appends a row, as written.Log does."""
        numbers = {name: float(row[name]) for name in sorted(row)}
        self._file.write(
            json.dumps(
                {"step": step} | {name: number if math.isfinite(number) else None for name, number in numbers.items()}
            )
            + "\n"
        )

    def close(self) -> None:
        self._file.close()


def read(path: str | Path, *, growing: bool = False) -> list[dict]:
    """Returns the rows of a metrics.jsonl. null becomes NaN again.

    Args:
      growing: the run may go on. A last line without its end is left out.

    Raises:
      ValueError: a line is no JSON object. The sentence names file and line.
    """
    rows, data = [], Path(path).read_bytes()
    for number, line in enumerate(data[: data.rfind(b"\n") + 1 if growing else None].splitlines(), start=1):
        where = f"{path}, line {number}"
        try:
            row = json_text.parsed(line.decode("utf-8"), where)
        except UnicodeDecodeError as error:
            raise ValueError(f"{where}: is no UTF-8 text: {error.reason} at byte {error.start}") from error
        if not isinstance(row, dict):
            raise ValueError(f"{where}: must hold a JSON object, got a {type(row).__name__}")
        rows.append({name: math.nan if value is None else value for name, value in row.items()})
    return rows
