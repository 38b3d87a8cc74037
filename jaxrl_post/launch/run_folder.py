"""The folder of a run: chosen once, made new, never written over; or taken up again, to go on with its run.

With several processes process 0 makes it and tells the others; each then writes below process_K, so that their files
can be compared byte by byte.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable
from pathlib import Path

import jax

from jaxrl_post.parallel.processes import share_text

# What a run leaves in its folder before its config.json is there; by that file a run is known.
_EARLY = re.compile(r"process_\d+|checkpoints|rollouts|evaluations|[a-z_]+\.jsonl(\.part)?|config\.json.*")


def make(exact: str, parent: str, name: str, seed: int) -> Path:
    """`exact` if given, else parent/NAME-SEED-NNN with the next free number; the same path on every process.

    Raises:
      ValueError: `exact` exists and is not an empty folder, or none can be made there.
    """
    word, _, told = _first_says(
        lambda: _exact(Path(exact)) if exact else _numbered(Path(parent), f"{name}-{seed}"),
        f"--run-dir={exact}" if exact else f"run_dir={parent}",
    ).partition(" ")
    if word != "new":
        raise ValueError(told)
    return Path(told)


def take_up(exact: str, must_exist: bool) -> tuple[Path, bool]:
    """The folder of a run to go on with, and whether it is new: without `must_exist` a folder that is missing is made.

    Raises:
      ValueError: it must exist and does not, it is the folder of something else, or it cannot be made or read.
    """
    word, _, told = _first_says(lambda: _there(Path(exact), must_exist), f"--run-dir={exact}").partition(" ")
    if word == "not":
        raise ValueError(told)
    return Path(exact), word == "new"


def own(folder: Path) -> Path:
    """Where this process writes: the folder itself when it is alone, else process_K inside."""
    if jax.process_count() == 1:
        return folder
    mine = folder / f"process_{jax.process_index()}"
    mine.mkdir(parents=True, exist_ok=True)
    return mine


def _first_says(look: Callable[[], str], named: str) -> str:
    """What process 0 found, on all: "new" or "old" and a path, or "not" and why; also where the system refuses."""
    found = ""
    if jax.process_index() == 0:
        try:
            found = look()
        except OSError as error:
            found = (
                f"not {named}: {error.strerror or error} ({error.filename}): name a place where a folder can be made"
            )
    return share_text(found)


def _there(path: Path, must_exist: bool) -> str:
    """new, old, or not and why it cannot be taken up."""
    if not path.exists():
        if must_exist:
            return f"not --resume={path}: there is no such folder; to begin a run there write --run-dir={path} --resume"
        path.mkdir(parents=True)
        return "new"
    entries = [entry.name for entry in path.iterdir()] if path.is_dir() else [path.name]
    if not path.is_dir() or not ("config.json" in entries or all(_EARLY.fullmatch(name) for name in entries)):
        return f"not --resume: {path} is not the folder of a run: it holds {sorted(entries)[0]!r} and no config.json"
    return "old"


def _exact(path: Path) -> str:
    if path.exists() and (not path.is_dir() or any(path.iterdir())):
        return (
            f"not --run-dir={path} exists already and is not an empty folder: a run is never written over; name a "
            "new one, or leave --run-dir out"
        )
    path.mkdir(parents=True, exist_ok=True)
    return f"new {path}"


def _numbered(parent: Path, stem: str) -> str:
    parent.mkdir(parents=True, exist_ok=True)
    taken = [p.name.removeprefix(f"{stem}-") for p in parent.glob(f"{stem}-*")]
    number = 1 + max((int(t) for t in taken if t.isdigit()), default=0)
    path = parent / f"{stem}-{number:03d}"
    path.mkdir()  # fails, rather than shares, when another run was faster
    return f"new {path}"


def contents(folder: Path) -> list[str]:
    """What lies in a run's folder, a line each."""
    words = {
        "config.json": "the resolved config, and what else the run was keyed by",
        "summary.json": "figures before and after",
        "bias.json": "launched against trained lengths, and what was thrown away",
        "metrics.jsonl": "one row per step and per evaluation",
        "rollouts": "every training rollout, by step",
        "evaluations": "every evaluation's answers, by step",
        "scheduler_log.jsonl": "every decision, with its clock",
        "dispatches.jsonl": "every dispatch: its clock, its steps, what its rows were for",
        "rewards.jsonl": "every training score",
        "eval_rewards.jsonl": "every evaluation's score",
        "policy": "the trained model, as a Hugging Face directory",
        "checkpoints": "the whole run, to be resumed",
        "trace": "the first rounds from that step on, for ui.perfetto.dev and scripts/plot_rounds.py",
    }
    there = sorted(path.name for path in folder.iterdir())
    return [
        "",
        str(folder),
        *(f"  {name:<20}  {words.get(re.sub(r'_[0-9]+[.]json', '', name), 'of one process')}" for name in there),
    ]


def write_json(path: Path, value: dict) -> None:
    """Whole or not at all."""
    part = path.with_name(f"{path.name}.part")
    part.write_text(json.dumps(value, indent=2, allow_nan=False) + "\n", encoding="utf-8")
    os.replace(part, path)
