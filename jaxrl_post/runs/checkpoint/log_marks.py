"""How far the logs of a run have come at a checkpoint, and how they are cut back to it.

A run with logs and without a checkpoint was killed before its first save, or robbed of its saves. Invariant: no finished step
is lost without a word. A run that was killed before its first save may begin again, and its logs are kept below `unsaved/`
until it has finished. A run that had saved, or that never saves, is refused untouched.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path

from jaxrl_post.ring import written

UNSAVED = "unsaved"
_METRICS = "metrics.jsonl"
LOGS = (
    _METRICS,
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


def last_step(folder: Path) -> int:
    """Returns the last finished step in a run's metrics; 0 where none is finished. Omits a line cut short by a crash."""
    return max((step for step, _ in _steps(folder)), default=0)


def _steps(folder: Path) -> Iterator[tuple[int, bool]]:
    """Yields each step of a run's metrics, and whether its weights were published: only then its row has seconds."""
    file = folder / _METRICS
    for line in file.read_bytes().split(b"\n") if file.is_file() else ():
        try:
            row = json.loads(line)
        except ValueError:
            continue
        step = row.get("step") if isinstance(row, dict) else None
        if isinstance(step, int):
            yield step, "timing_s/step" in row


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
    due = min(-(-every // updates) * updates, config["steps"])
    # a pipeline may take several steps before it publishes, and saves with the first publish that reaches the step
    rows = list(_steps(place))
    first = next((step for step, published in rows if published and step >= due), steps if rows else due)
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
    kept = folder / UNSAVED
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
    shutil.rmtree(folder / UNSAVED, ignore_errors=True)
