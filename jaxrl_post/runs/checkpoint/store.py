"""Checkpoints of the whole run: weights and optimizer (Orbax), the host's state, and the length of every log.

    checkpoints/step_000012/ arrays/  host/process_K/{state.json, arrays.npz}  about.json  MANIFEST.json

Invariants:
- MANIFEST.json is written last, is signed, and lists every file (signed_files.py). A step is valid when its files agree
  with it. Only valid steps are restored. Orbax alone restores a flipped byte silently and lists half-deleted steps.
- Each process hashes the files that it wrote, and reads a share of all files before a step is restored.
- A save that fails leaves nothing. The run goes on to the next save, and ends after `max_failures` in a row.
- A step is written under another name and then renamed. Before it is deleted it is renamed too. So a kill at any
  moment leaves only whole steps, and leftovers with names of their own.

There is no pickle. All processes of a job share one POSIX file system, or each has a disk of its own (disks.py).
"""

from __future__ import annotations

import dataclasses
import errno
import json
import os
import re
import secrets
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import jax

from jaxrl_post.parallel import exchange
from jaxrl_post.ring import written
from jaxrl_post.runs.checkpoint.arrays import SPARE, OnHost, Saved, kinds, named
from jaxrl_post.runs.checkpoint.disks import ONE_DISK, Disks
from jaxrl_post.runs.checkpoint.host_state import read_state, write_state
from jaxrl_post.runs.checkpoint.signed_files import (
    ABOUT,
    KEY,
    MANIFEST,
    UNSIGNED,
    damage,
    hashed,
    listed,
    manifest,
    read_key,
)

# Orbax raises the second where the disk is full, and the third where a file system refuses a rename as not known to it.
_FAILURES = (OSError, ValueError, NotImplementedError)


class SaveFailed(RuntimeError):
    """Several saves in a row have failed, so the run can no longer be resumed from near its end."""


# ---- the steps of a run


class Checkpoints:
    """The steps saved below `folder`.

    Args:
      keep_last: how many of the newest steps are kept. Older steps are deleted after a newer one is complete.
      max_failures: failed saves in a row that end the run. 0: none do.
      say: gets one line for each damaged step and each failed save.
      reach: called with "before_save", "mid_save", "after_save" and "prune", for faults on purpose.
      disks: one for all processes, or one for each.
    """

    def __init__(
        self,
        folder: str | Path,
        *,
        keep_last: int,
        say: Callable[[str], object],
        max_failures: int = 3,
        reach: Callable[[str], None] = lambda point: None,
        disks: Disks = ONE_DISK,
    ):
        assert keep_last >= 2, f"keep_last={keep_last} leaves nothing to fall back on"
        self._folder, self._keep, self._say = Path(folder), keep_last, say
        self._disks, self._most, self._failed, self._reach = disks, max_failures, 0, reach
        self.lost = ""  # why the last save of the run failed

    def save(self, step: int, arrays: Any, host: Mapping, about: Mapping, last: bool = False) -> None:
        """Saves a step. The step is complete when this returns, or it failed, which is said in one line.

        A failure of another process than 0 ends the job.

        Args:
          arrays: a tree of jax arrays, or what `on_host` made of it.
          host: nested dicts and lists of plain values and numpy arrays. Each process has its own.
          about: JSON.
          last: no further save follows, so a failure stays in `lost`.

        Raises:
          SaveFailed: the last `max_failures` saves have failed.
        """
        given = arrays.named if isinstance(arrays, OnHost) else named(arrays)
        self._reach("before_save")
        try:
            self._check_space(given)
            self._save(step, given, host, about)
            self._failed, self.lost = 0, ""
        except _FAILURES as error:
            if jax.process_count() > 1:
                raise
            self._failed += 1
            reason = f"step {step} was not saved: {_one_line(error)}; {self._left_by_failure()}"
            if self._most and self._failed >= self._most:
                raise SaveFailed(
                    f"{reason}; {self._failed} saves in a row failed, which is checkpoint.max_failures"
                ) from error
            if last:
                self.lost = f"{reason}; it was the last save of the run, and none follows"
            self._say(f"CHECKPOINT FAILED: {self.lost or f'{reason}; the run goes on, and the next save tries again'}")

    def _left_by_failure(self) -> str:
        """Removes what a failed save left, and says which step is the newest whole one."""
        try:
            self._remove_leftovers()
            whole = [n for n in self.steps() if not damage(self._folder / _name(n), self._key(), contents=False)]
        except _FAILURES as error:
            return f"which steps are whole is not known: {_one_line(error)}"
        return f"the newest whole one is step {whole[-1]}" if whole else "there is no whole one yet"

    def _check_space(self, given: Mapping[str, Any]) -> None:
        """Raises OSError where the disk has no room for the arrays."""
        self._folder.mkdir(parents=True, exist_ok=True)
        needed = sum(leaf.size * leaf.dtype.itemsize for leaf in given.values()) + SPARE
        free = shutil.disk_usage(self._folder).free
        if free < needed:
            raise OSError(errno.ENOSPC, f"it needs {needed:,} bytes, and {free:,} are free", str(self._folder))

    def _key(self) -> bytes:
        """Returns the key of the run, which is made before the first save.

        Raises:
          OSError: there are steps and no key.
        """
        path = self._folder / KEY
        if not path.is_file() and not self.steps():
            self._folder.mkdir(parents=True, exist_ok=True)
            part = path.with_name(f"{KEY}.part")
            secret = os.open(part, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
            with written.naming(path), open(secret, "w") as file:
                file.write(secrets.token_hex(32))
            os.replace(part, path)
        return read_key(self._folder)

    def _save(self, step: int, given: Mapping[str, Any], host: Mapping, about: Mapping) -> None:
        first, path = jax.process_index() == 0, self._folder / _name(step)
        part = path.with_name(f"{path.name}.part")
        if self._disks.writes:
            assert not path.exists(), f"{path} was saved before"
            _remove(part)
            part.mkdir(parents=True)
        exchange.broadcast_text("")
        self._disks.write(part / "arrays", given)
        self._reach("mid_save")
        write_state(part / "host" / f"process_{jax.process_index()}", host)
        exchange.broadcast_text("")
        if first:
            _write_json(part / ABOUT, {**about, "step": step, "arrays": kinds(given)})
        own = hashed(part, jax.process_index())
        self._disks.bring(part, own)
        exchange.broadcast_text("")
        if first:
            _write_json(part / MANIFEST, manifest(part, step, self._key(), own))
        if self._disks.writes:
            os.replace(part, path)
            self._reach("after_save")
            _settle(self._folder)
            self._prune(step)

    def newest(self) -> Saved | None:
        """Returns the newest valid step, or None where nothing was saved yet.

        Damaged steps that are newer are moved aside, with a message. Leftovers of a kill are removed.

        Raises:
          ValueError: steps were saved, and all of them are damaged.
        """
        try:
            return self._newest()
        except OSError as error:  # of process 0, which then ends the job
            raise ValueError(f"resume: the checkpoints cannot be taken up: {_one_line(error)}") from error

    def _newest(self) -> Saved | None:
        first = jax.process_index() == 0
        refusal = exchange.broadcast_text(self._prepare() if self._disks.writes else "")
        if refusal:
            raise ValueError(refusal)
        while number := exchange.broadcast_text(str(max(self.steps(), default="")) if first else ""):
            path = self._folder / _name(int(number))
            reason = exchange.first_text(self._damage(path))
            if not reason:
                about = json.loads((path / ABOUT).read_text(encoding="utf-8"))
                # Processes decide alike, so the state of process 0 serves any number of them.
                mine = jax.process_index() if about.get("processes") == jax.process_count() else 0
                state = path / "host" / f"process_{mine}"
                return Saved(step=int(number), path=path, about=about, host=read_state(state) if state.is_dir() else {})
            if self._disks.writes:
                self._set_apart(int(number), reason)
        damaged = sorted(path.name for path in self._folder.glob("step_*.damaged-*")) if first else []
        if damaged := exchange.broadcast_text(", ".join(damaged[:4])):
            raise ValueError(
                f"resume: every checkpoint in {self._folder} is damaged ({damaged}); begin a new run in another folder"
            )
        return None

    def _damage(self, path: Path) -> str:
        """Returns why a step is not valid, as far as this process looks, or an empty text."""
        try:
            return damage(path, read_key(self._folder), share=(jax.process_index(), jax.process_count()))
        except OSError as error:
            return f"it cannot be read ({error.strerror})"

    def _set_apart(self, step: int, reason: str) -> None:
        """Moves a damaged step aside and says why."""
        path = self._folder / _name(step)
        aside = next(p for n in range(1, 1 << 20) if not (p := path.with_name(f"{path.name}.damaged-{n}")).exists())
        os.replace(path, aside)
        self._say(
            f"CHECKPOINT DAMAGED: step {step} is not used, because {reason}; it was moved to {aside}, and "
            "the run falls back on the newest whole step before it"
        )

    def before(self, step: int) -> Saved | None:
        """Returns the newest valid step before `step`, without the host's state, or None. Nothing is moved aside."""
        for number in reversed(self.steps()):
            if number < step and not damage(self._folder / _name(number), read_key(self._folder)):
                return self._saved(number)
        return None

    def at(self, step: int | None, asked: str) -> Saved:
        """Returns a valid step with the state of process 0. Nothing is changed.

        Args:
          step: None: the newest that is valid.
          asked: what asks for the step, which begins every error.

        Raises:
          ValueError: there is no such step, or it is damaged; with the steps that are there.
        """
        there = self.steps()
        if step not in (None, *there) or not there:
            steps = f"it has {', '.join(map(str, there))}" if there else "it has none"
            raise ValueError(
                f"{asked}: there is no {f'step {step}' if step is not None else 'checkpoint'} in {self._folder}; {steps}"
            )
        try:
            key = read_key(self._folder)
        except (OSError, ValueError) as error:
            raise ValueError(f"{asked}: {self._folder / KEY} cannot be read, so no step can be verified") from error
        reasons = {}
        for number in reversed(there) if step is None else [step]:
            path = self._folder / _name(number)
            if not (reason := damage(path, key)):
                return dataclasses.replace(self._saved(number), host=read_state(path / "host" / "process_0"))
            reasons[number] = reason
        told = "; ".join(f"step {number} is damaged, because {reason}" for number, reason in reasons.items())
        raise ValueError(f"{asked}: {told}; steps are {', '.join(map(str, there))}")

    def about(self, step: int) -> Mapping:
        """Returns the identity of the run that saved a step. Its other files are not looked at."""
        return json.loads((self._folder / _name(step) / ABOUT).read_text("utf-8"))

    def _saved(self, step: int) -> Saved:
        """Returns a step without the host's state."""
        return Saved(step=step, path=self._folder / _name(step), about=self.about(step), host={})

    def steps(self) -> list[int]:
        """Returns the numbers of all step folders, valid or not, in order."""
        names = [path.name for path in self._folder.iterdir()] if self._folder.is_dir() else []
        found = sorted(int(name.removeprefix("step_")) for name in names if re.fullmatch(r"step_[0-9]{6,18}", name))
        return [step for step in found if _name(step) in names]  # a renamed step may have other zeros

    def _prepare(self) -> str:
        """Removes leftovers of a kill. Returns an empty text, or why no step can be verified."""
        self._remove_leftovers()
        try:
            key = self._key() if self._folder.is_dir() else b""
        except (OSError, ValueError) as error:
            return (
                f"resume: {self._folder / KEY} is missing or unreadable ({type(error).__name__}), and without it no "
                "checkpoint can be verified; put it back, or begin a new run"
            )
        reasons = [listed(self._folder / _name(step), key)[1] for step in self.steps()]
        if len(reasons) > 1 and all(reason == UNSIGNED for reason in reasons):
            return (
                f"resume: no checkpoint in {self._folder} is signed with {KEY}, the key of the run: the key or every "
                f"{MANIFEST} was changed; put it back, or begin a new run"
            )
        return ""

    def _remove_leftovers(self) -> None:
        """Removes what a kill or a failed save left. Threads of Orbax may write on while a failed save is removed."""
        for leftover in [*self._folder.glob("*.part"), *self._folder.glob("step_*.gone")]:
            _remove(leftover)

    def _prune(self, step: int) -> None:
        """Deletes all but the newest `keep_last` steps, or says why it cannot: the step is saved all the same.

        Steps with a missing or cut file are left alone."""
        try:
            self._remove_leftovers()
            self._delete_old()
        except _FAILURES as error:
            self._say(
                f"CHECKPOINT: step {step} is saved, and an older one cannot be removed: {_one_line(error)}; the next save "
                "tries again"
            )

    def _delete_old(self) -> None:
        whole = [step for step in self.steps() if self._disks.whole(self._folder / _name(step), self._key)]
        for step in whole[: -self._keep]:
            path = self._folder / _name(step)
            gone = path.with_name(f"{path.name}.gone")
            os.replace(path, gone)
            self._reach("prune")
            _remove(gone)


def read_only(run: Path) -> Checkpoints:
    """Returns the steps that lie in the folder of a run. Nothing is saved there."""
    return Checkpoints(run / "checkpoints", keep_last=2, say=print)


def _name(step: int) -> str:
    return f"step_{step:06d}"


def _one_line(error: BaseException) -> str:
    """Returns the words of an error. Those of tensorstore name the reason last, before a list of its options."""
    text = re.split(r" \[(?:os_error_code|tensorstore_spec|source locations)=", " ".join(str(error).split()))[0]
    return text if len(text) <= 300 else f"{text[:90]} ... {text[-200:]}"


def _write_json(path: Path, value: Mapping) -> None:
    with written.naming(path), open(path, "w", encoding="utf-8") as file:
        json.dump(value, file, indent=1, sort_keys=True)
        file.flush()
        os.fsync(file.fileno())


def _settle(folder: Path) -> None:
    """Flushes the folder, so that renames in it are on disk when this returns."""
    handle = os.open(folder, os.O_RDONLY)
    os.fsync(handle)
    os.close(handle)


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)
