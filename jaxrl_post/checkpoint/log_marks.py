"""How far the logs of a run have come at a checkpoint, and how they are cut back to it."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path

from jaxrl_post import written

LOGS = (
    "metrics.jsonl",
    "scheduler_log.jsonl",
    "dispatches.jsonl",
    "rewards.jsonl",
    "eval_rewards.jsonl",
    "rollouts/index.jsonl",
    "evaluations/index.jsonl",
    "completions/index.jsonl",
)


def marks(folder: Path) -> dict[str, int]:
    """The bytes of every log below a run's folder, on disk when this returns."""
    out = {}
    for name in LOGS:
        if (folder / name).is_file():
            with written.naming(folder / name), open(folder / name, "rb") as file:
                os.fsync(file.fileno())
                out[name] = os.fstat(file.fileno()).st_size
    return out


def rewind(folder: Path, to: Mapping[str, int]) -> None:
    """Logs as they were at `to` (what is not in it was not there): lines and rollout files that came later are removed.

    Raises:
      ValueError: see `check_reach`; then nothing was changed.
    """
    check_reach(folder, to)
    for name in LOGS:
        if name not in to:
            (folder / name).unlink(missing_ok=True)
        else:
            os.truncate(folder / name, to[name])
    for index in (folder / name for name in LOGS if name.endswith("index.jsonl")):
        lines = index.read_text(encoding="utf-8").splitlines() if index.is_file() else []
        kept = {json.loads(line)["file"] for line in lines}
        for path in index.parent.glob("step_*"):
            if path.name not in kept:
                path.unlink()


def check_reach(folder: Path, to: Mapping[str, int]) -> None:
    """
    Raises:
      ValueError: a log lacks bytes that it had.
    """
    for name, size in to.items():
        there = (folder / name).stat().st_size if (folder / name).is_file() else 0
        if there < size:
            raise ValueError(
                f"resume: {folder / name} has {there} bytes, the checkpoint knows of {size}: lines of a "
                "log were lost or removed; put them back, or begin a new run"
            )
