"""The folder of a run: made new and never written over, or found again to resume its run. One job at a time writes there.

In a job of several processes, process 0 makes the folder and shares its path. Each process then writes below process_K,
so that their files can be compared byte by byte. Where processes have disks of their own, each makes a folder.

Process 0 of a job holds the lock for all, or each process that of its own disk. The file `.lock` names the holder's host
and process while it is held. The kernel releases the lock with the process, so a killed run leaves none behind.
"""

from __future__ import annotations

import contextlib
import difflib
import errno
import fcntl
import json
import os
import re
import shutil
import socket
import stat
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import jax

from jaxrl_post.config import Config, fields
from jaxrl_post.parallel.exchange import first_text
from jaxrl_post.ring import json_text, written
from jaxrl_post.runs import agreement
from jaxrl_post.runs.checkpoint.disks import ONE_DISK, Disks

# What a run writes before config.json, the file by which the folder of a run is recognised.
_EARLY = re.compile(
    r"\.lock|attempts|parent\.json|process_\d+|checkpoints|rollouts|evaluations|completions|[a-z_]+\.jsonl(\.part)?"
    r"|hang\.txt|rewards\.log|tensorboard|wandb|wandb\.json(\.part)?|config\.json.*"
)


# What the end of a run writes, and the file by which it is recognised. Anything else there would stop it, after all training.
_EXPORTS = {"policy": "config.json", "reward_model": "config.json", "adapter": "adapter_config.json"}
LOCK = ".lock"


class RunFolder(NamedTuple):
    """The folder of a run. `new`: it was made just now."""

    place: Path
    new: bool


def make(exact: str, parent: str, name: str, seed: int, disks: Disks = ONE_DISK) -> RunFolder:
    """Makes `exact` if given, else parent/NAME-SEED-NNN with the next free number. On one disk all get the same path.

    Raises:
      ValueError: `exact` exists and is not an empty folder, or none can be made there.
    """
    return _found(
        lambda: _exact(Path(exact)) if exact else _numbered(Path(parent), f"{name}-{seed}"),
        f"--run-dir={exact}" if exact else f"run_dir={parent}",
        disks,
    )


def first_missing(path: Path) -> Path | None:
    """Returns the topmost folder of a path that is not there, or None where all of it is."""
    missing = [place for place in (path, *path.parents) if not place.exists()]
    return missing[-1] if missing else None


def remove(place: Path, since: Path | None) -> None:
    """Removes the folder of a run that could not start, and every empty folder above it down from `since`."""
    shutil.rmtree(place)
    above = place.parent
    with contextlib.suppress(OSError):  # not empty: another run has begun there
        while since is not None and (above == since or since in above.parents):
            above.rmdir()
            above = above.parent


def take_up(exact: str, must_exist: bool, disks: Disks = ONE_DISK) -> RunFolder:
    """Finds the folder of a run to resume.

    Args:
      must_exist: refuse a missing folder; otherwise it is made.

    Raises:
      ValueError: the folder is missing, belongs to something else, or cannot be made or read.
    """
    return _found(lambda: _there(Path(exact), must_exist), f"--run-dir={exact}", disks)


def read_config(place: Path, flag: str) -> dict | None:
    """Returns what config.json in the folder of a run says, or None where there is no such file.

    Args:
      flag: what asks for it, which begins every error.

    Raises:
      ValueError: it cannot be read.
    """
    file = place / "config.json"
    if not file.is_file():
        return None
    return json_text.read_object(file, f"{flag}: {file} cannot be read")


def recorded(exact: str) -> dict[str, dict]:
    """Returns, by section, what config.json says of options whose default depends on the platform or on the start, on every process.

    Empty where the folder holds no run yet.

    Raises:
      ValueError: config.json cannot be read.
    """

    def look() -> dict[str, dict]:
        told = read_config(Path(exact), "--resume") or {}
        out: dict[str, dict] = {}
        for option in fields.options(Config):
            section, _, name = option.name.rpartition(".")
            kept = option.about.accelerator is not None or option.about.recorded
            if kept and isinstance(where := told.get(section), dict) and name in where:
                out.setdefault(section, {})[name] = where[name]
        return out

    return agreement.of_first(look)


def settings(place: Path, flag: str) -> dict:
    """Returns the config of the run in a folder, by section, as its config.json has it.

    Args:
      flag: what asks for it, which begins every error.

    Raises:
      ValueError: there is no such folder, or no config.json of a run in it.
    """
    if not place.is_dir():
        there = [path.name for path in place.parent.iterdir() if path.is_dir()] if place.parent.is_dir() else []
        near = difflib.get_close_matches(place.name, there, n=1)
        raise ValueError(
            f"{flag}: there is no folder {place}" + (f"; nearest is {place.parent / near[0]}" if near else "")
        )
    found = read_config(place, flag)
    if found is None:
        raise ValueError(f"{flag}: {place} has no config.json to go by: name the config by --config=FILE")
    return {name: value for name, value in found.items() if name != "derived"}


def own(folder: Path) -> Path:
    """Returns where this process writes: the folder itself, or process_K inside it in a job of several processes."""
    if jax.process_count() == 1:
        return folder
    mine = folder / f"process_{jax.process_index()}"
    mine.mkdir(parents=True, exist_ok=True)
    return mine


def _found(look: Callable[[], RunFolder], named: str, disks: Disks) -> RunFolder:
    """Returns what this process found on its own disk, or what process 0 found on the disk of all.

    Raises:
      ValueError: a process refused its folder, or the system refused that process.
    """

    def looked() -> tuple[str, bool]:
        try:
            place, new = look()
        except OSError as error:
            reason = f"{error.strerror or error} ({error.filename})"
            raise ValueError(f"{named}: {reason}: name a place where a folder can be made") from error
        return str(place), new

    if not disks.own:
        place, new = agreement.of_first(looked)
        return RunFolder(Path(place), new)
    refusal = ""
    try:
        place, new = looked()
    except ValueError as error:
        refusal = str(error)
    if refusal := first_text(refusal):
        raise ValueError(refusal)
    return RunFolder(Path(place), new)


def _there(path: Path, must_exist: bool) -> RunFolder:
    """Finds the folder of a run to resume, or makes it."""
    if not path.exists():
        if must_exist:
            raise ValueError(
                f"--resume={path}: there is no such folder; to begin a run there write --run-dir={path} --resume"
            )
        path.mkdir(parents=True)
        return RunFolder(path, new=True)
    entries = [entry.name for entry in path.iterdir()] if path.is_dir() else [path.name]
    if not path.is_dir() or not ("config.json" in entries or all(_EARLY.fullmatch(name) for name in entries)):
        raise ValueError(
            f"--resume: {path} is not the folder of a run: it holds {sorted(entries)[0]!r} and no config.json"
        )
    for name, config in _EXPORTS.items():
        if (path / name).exists() and not (path / name / config).is_file():
            raise ValueError(
                f"--resume: {path / name} is no model of this run: it has no {config}, and the end of the run writes there; "
                "move it away"
            )
    return RunFolder(path, new=False)


def _exact(path: Path) -> RunFolder:
    """Makes the folder that the user named; it must be new or empty."""
    if path.exists() and (not path.is_dir() or any(entry.name != LOCK for entry in path.iterdir())):
        raise ValueError(
            f"--run-dir={path} exists already and is not an empty folder: a run is never written over; name a "
            "new one, or leave --run-dir out"
        )
    path.mkdir(parents=True, exist_ok=True)
    return RunFolder(path, new=True)


def _numbered(parent: Path, stem: str) -> RunFolder:
    """Makes the next numbered folder."""
    parent.mkdir(parents=True, exist_ok=True)
    taken = [p.name.removeprefix(f"{stem}-") for p in parent.glob(f"{stem}-*")]
    number = 1 + max((int(t) for t in taken if t.isdigit()), default=0)
    path = parent / f"{stem}-{number:03d}"
    path.mkdir()  # fails, rather than shares, when another run was faster
    return RunFolder(path, new=True)


def contents(folder: Path) -> list[str]:
    """Describes what lies in the folder of a run, one line each."""
    words = {
        "config.json": "the resolved config, and what else the run was keyed by",
        "attempts": "each start and end of its processes, with exit codes",
        "parent.json": "the run and the step that this one branched from",
        "summary.json": "figures before and after",
        "hang.txt": "the stacks of all threads at a hang",
        "hang.json": "the scheduler's state at a hang",
        "skipped": "batches whose gradient was not finite, by step",
        "bias.json": "launched against trained lengths, and what was thrown away",
        "metrics.jsonl": "one row per step and per evaluation",
        "rollouts": "every training rollout, by step",
        "evaluations": "every evaluation's rollouts, by step",
        "completions": "held-out completions with the policy's log-probs, by evaluation",
        "scheduler_log.jsonl": "every decision, with its clock",
        "dispatches.jsonl": "every dispatch: its clock, its steps, what its rows were for",
        "rewards.jsonl": "every training score",
        "eval_rewards.jsonl": "every evaluation's score",
        "rewards.log": "what reward functions printed, at most 8 MiB",
        "report.html": "curves, time, lengths and rollouts on one page, for a browser",
        "tensorboard": "the rows of metrics.jsonl, for tensorboard --logdir",
        "wandb": "the rows of metrics.jsonl, for wandb sync",
        "wandb.json": "the id of the run at Weights & Biases",
        "policy": "the trained model, as a Hugging Face directory",
        "reward_model": "the trained reward model, as a Hugging Face directory",
        "adapter": "the low-rank additions, for PEFT",
        "checkpoints": "the whole run, to be resumed",
        "unsaved": "logs from before a kill that no checkpoint had, kept until the run has finished",
        "trace": "the first rounds from that step on, for ui.perfetto.dev and scripts/plot_rounds.py",
    }
    there = sorted(path.name for path in folder.iterdir() if not path.name.startswith("."))
    return [
        "",
        str(folder),
        *(f"  {name:<20}  {words.get(re.sub(r'_[0-9]+[.]json', '', name), 'of one process')}" for name in there),
    ]


def write_json(path: Path, value: dict) -> None:
    """Writes a JSON file, whole or not at all."""
    written.whole(path, json.dumps(value, indent=2, allow_nan=False) + "\n")


def hold(folder: Path, stack: contextlib.ExitStack, disks: Disks = ONE_DISK) -> None:
    """Locks the folder for this job until `stack` closes.

    Raises:
      ValueError: another process holds it, or the folder cannot be written.
    """
    refusal = ""
    if disks.writes:
        try:
            stack.enter_context(_held(folder))
        except BlockingIOError:
            refusal = (
                f"{folder} is in use by {_holder(folder)}: a run is written by one job at a time; end that one first"
            )
        except OSError as error:
            refusal = (
                f"{folder} cannot be written: {error.strerror or error} ({error.filename}); name a --run-dir that can"
            )
    refusal = first_text(refusal)
    if refusal:
        raise ValueError(refusal)


@contextlib.contextmanager
def _held(folder: Path):
    with open(folder / LOCK, "ab", buffering=0, opener=_own_file) as file:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        about = {"host": socket.gethostname(), "pid": os.getpid(), "since": time.strftime("%Y-%m-%d %H:%M:%S")}
        with written.naming(folder / LOCK):
            file.truncate(0)
            written.put(file, json.dumps(about))
        try:
            yield
        finally:
            file.truncate(0)


def _own_file(path: str, flags: int) -> int:
    """Opens a file that nothing else names: what is written into a link would be lost to its target.

    Raises:
      OSError: it is a link, has a second name, or is no file.
    """
    descriptor = os.open(path, flags | os.O_NOFOLLOW | os.O_NONBLOCK)
    about = os.fstat(descriptor)
    if not stat.S_ISREG(about.st_mode) or about.st_nlink > 1:
        os.close(descriptor)
        raise OSError(errno.EEXIST, "it is no file of this folder alone; remove it", path)
    return descriptor


def _holder(folder: Path) -> str:
    """Describes who holds the lock."""
    try:
        about = json.loads((folder / LOCK).read_text(encoding="utf-8"))
        return f"process {about['pid']} on host {about['host']} since {about['since']}"
    except (OSError, ValueError, KeyError, TypeError):
        return "another process"
