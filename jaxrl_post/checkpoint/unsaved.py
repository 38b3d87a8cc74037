"""Runs with logs and without a checkpoint: killed before their first save, or robbed of their saves.

Invariant: no finished step is lost without a word. A run that was killed before its first save may begin again, and its
logs are kept below `unsaved/` until it has finished. A run that had saved, or that never saves, is refused untouched.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Mapping
from pathlib import Path

from jaxrl_post.checkpoint.log_marks import LOGS

NAME = "unsaved"
_METRICS = "metrics.jsonl"


def last_step(folder: Path) -> int:
    """Returns the last finished step in a run's metrics; 0 where none is finished. Omits a line cut short by a crash."""
    file = folder / _METRICS
    last = 0
    for line in file.read_bytes().split(b"\n") if file.is_file() else ():
        try:
            row = json.loads(line)
        except ValueError:
            continue
        step = row.get("step") if isinstance(row, dict) else None
        last = max(last, step if isinstance(step, int) else 0)
    return last


def refusal(place: Path, steps: int, config: Mapping) -> str:
    """Returns why a run without a checkpoint cannot begin again, or an empty text where it may.

    Args:
      steps: the last finished step in its metrics.
      config: of the run, as config.json says it.
    """
    saves = place / "checkpoints"
    if steps == 0 or any(saves.glob("step_*.damaged-*")):
        return ""  # nothing is lost, or the damaged steps are the reason to give
    every, rounds = config["checkpoint"]["every"], config["scheduler"]
    updates = rounds["mini_batches"] * rounds["ppo_epochs"]  # optimizer steps for each publish
    first = min(-(-every // updates) * updates, config["steps"])
    begun = any(saves.glob(f"step_{first:06d}.part"))
    if every > 0 and not (place / "summary.json").exists() and (steps <= first or begun):
        return ""
    reason = f"its first save was due at step {first}" if every > 0 else "checkpoint.every=0 saves none"
    return (
        f"--resume: {place} has logs of {steps} finished steps and no checkpoint to go on from ({reason}); put "
        f"{saves} back, or begin a new run in another folder: nothing was changed here"
    )


def set_aside(folder: Path) -> None:
    """Moves the logs of a run that begins again to the next free folder below `unsaved/`. Metrics go last, because they
    say that there is something to keep."""
    kept = folder / NAME
    kept.mkdir(exist_ok=True)
    number = 1 + max((int(path.name) for path in kept.iterdir() if path.name.isdigit()), default=0)
    target = kept / f"{number:03d}"
    target.mkdir()
    names = dict.fromkeys(name.partition("/")[0] for name in LOGS)
    for name in sorted(names, key=lambda name: name == _METRICS):
        if (folder / name).exists():
            os.replace(folder / name, target / name)


def forget(folder: Path) -> None:
    """Removes what was set aside, when the run has finished and has logged these steps again."""
    shutil.rmtree(folder / NAME, ignore_errors=True)
