"""How often a run was started and how each attempt ended: noted by every process in the run's folder, read without it.

A process notes its start and its end with the exit code below `attempts/`, in a file of its own. An attempt is one start of
the whole job. A start without an end is a process that was killed, or one that still lives. A bucket alone says the same of
its run, as its newest whole commit has it. Reading changes nothing there, and jax is not loaded.

Invariant: what a run computes never depends on these notes.
"""

from __future__ import annotations

import difflib
import json
import os
import re
import socket
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from jaxrl_post.config.address import parse
from jaxrl_post.ring import written
from jaxrl_post.ring.json_text import read_object
from jaxrl_post.runs.buckets import record, tree
from jaxrl_post.runs.buckets.objects import Objects
from jaxrl_post.runs.checkpoint import log_marks

NAME = "attempts"
_FEW = 8  # processes whose exit codes are told one by one
_CLOCKS_S = 5.0  # by which clocks may differ without a word
_STATUS_FILES = re.compile(r"config\.json|attempts/.*|(process_0/)?metrics\.jsonl")


# ---- written


@dataclass(frozen=True, kw_only=True)
class Present:
    """The present attempt of this process, since `began` on the monotonic clock. `code`: the exit code that is noted, None
    before its end."""

    file: Path
    number: int
    began: float
    code: int | None = None


_open: list[Present] = []


def begin(place: Path, index: int, processes: int, share: Callable[[str], str]) -> None:
    """Notes that this process of `processes` starts to work on the run in `place`. All processes of the job call it.

    Args:
      share: returns process 0's text on every process.

    Raises:
      OSError: the note cannot be written.
    """
    number = int(share(str(1 + max((one.number for one in _read(place)), default=0)) if index == 0 else ""))
    file = place / NAME / f"process_{index}.jsonl"
    file.parent.mkdir(parents=True, exist_ok=True)
    _open[:] = [Present(file=file, number=number, began=time.monotonic())]
    about = {"process": index, "processes": processes, "host": socket.gethostname(), "pid": os.getpid()}
    _append(file, {"event": "start", "attempt": number, "time": time.time()} | about)


def ending(code: int) -> None:
    """Notes how this process is about to end, while its folder can still be committed to a bucket. `end` may correct it."""
    if _open and _open[0].code is None:
        _note(_open[0], code, "")
        _open[0] = replace(_open[0], code=code)


def end(code: int, why: str = "") -> None:
    """Notes that this process ends with an exit code. Only the first call after `begin` notes anything.

    Where the note cannot be written, one line says so, and the process ends as it would have."""
    if _open and (present := _open.pop()).code != code:
        _note(present, code, why)


def _note(present: Present, code: int, why: str) -> None:
    if not present.file.parent.is_dir():  # the run could not start, and its folder was removed
        return
    try:
        seconds = time.monotonic() - present.began
        note = {"event": "end", "attempt": present.number, "time": time.time(), "seconds": seconds}
        _append(present.file, note | {"code": code, "why": why})
    except OSError as error:
        print(
            f"the end of attempt {present.number} could not be noted in {present.file}: {error.strerror}",
            file=sys.stderr,
        )


def _append(file: Path, note: dict) -> None:
    """Adds a line, on disk when this returns. A line that a crash cut short stays a line of its own."""
    with written.naming(file), open(file, "a+b") as out:
        torn = out.seek(0, os.SEEK_END) > 0
        if torn:
            out.seek(-1, os.SEEK_END)
            torn = out.read(1) != b"\n"
        out.write(b"\n" * torn + json.dumps(note).encode() + b"\n")
        out.flush()
        os.fsync(out.fileno())


# ---- read


@dataclass(frozen=True, kw_only=True)
class Process:
    """A process in an attempt. `code`: with which it ended, None where no end is noted. `why`: a sentence, or empty.

    `begun`: by the clock of its host, in UNIX seconds. `seconds`: how long it lasted, whatever that clock did meanwhile.
    """

    index: int
    host: str
    pid: int
    begun: float
    seconds: float | None
    code: int | None
    why: str

    @property
    def lives(self) -> bool | None:
        """Whether the process is there; None on another host than its own, which nobody here can tell."""
        if self.code is not None:
            return False
        if self.host != socket.gethostname():
            return None
        try:
            os.kill(self.pid, 0)
        except ProcessLookupError:
            return False
        except PermissionError:  # it is another user's
            return True
        return True


@dataclass(frozen=True, kw_only=True)
class Attempt:
    """One start of the whole job. `processes`: those that noted their start. `of`: how many the job has."""

    number: int
    of: int
    processes: tuple[Process, ...]

    @property
    def begun(self) -> float:
        return min(one.begun for one in self.processes)

    @property
    def seconds(self) -> float | None:
        """How long it lasted, as far as noted: as its longest process."""
        return max((one.seconds for one in self.processes if one.seconds is not None), default=None)


@dataclass(frozen=True, kw_only=True)
class Lease:
    """Who may write a run in a bucket. `live`: whether the lease has not ended. `committed_s`: seconds since the newest
    commit, None without one. `starts`: how often the run was taken, also by attempts that were killed before a commit."""

    holder: str
    live: bool
    committed_s: float | None
    starts: int


@dataclass(frozen=True, kw_only=True)
class Status:
    """What a run's folder says of the run.

    `step`: the last finished one. `steps`: how many it shall make, None before its config.json is there. `saved`: the newest
    checkpoint's step, None without one. `age_s`: seconds since the last sign of life, None without one, negative where that is
    ahead of this clock. `lease`: of a run in a bucket."""

    folder: Path | str
    attempts: tuple[Attempt, ...]
    step: int
    steps: int | None
    saved: int | None
    age_s: float | None
    lease: Lease | None = None

    @property
    def restarts(self) -> int:
        return max(len(self.attempts), self.lease.starts if self.lease else 0, 1) - 1

    @property
    def state(self) -> str:
        """Says what became of the newest attempt: it runs, has finished, was killed, or ended with an exit code."""
        if self.lease is not None and self.lease.live:
            return f"running, written by {self.lease.holder}"
        if not self.attempts:
            return "no attempt is noted"
        last = self.attempts[-1].processes
        codes, lives = [one.code for one in last], [self._lives(one) for one in last if one.code is None]
        if any(lives):
            return "running" if len(lives) == len(last) else "ending"
        if any(one is None for one in lives):
            return "running, or killed on another host"
        if set(codes) == {0}:
            return "finished"
        errors = sorted({code for code in codes if code})
        return f"ended with exit code {errors[0]}" if errors else "killed"

    def _lives(self, process: Process) -> bool | None:
        """Returns whether a process of the newest attempt is there; None where nobody knows."""
        return process.lives if self.lease is None or process.code is not None else self.lease.live

    def __str__(self) -> str:
        of = "" if self.steps is None else f" of {self.steps}"
        saved = "no checkpoint" if self.saved is None else f"newest checkpoint {self.saved}"
        age = "no sign of life" if self.age_s is None else f"last sign of life {_ago(self.age_s)}"
        lines = [f"{self.folder}: {self.state}; step {self.step}{of}, {saved}, {age}"]
        if self.lease is not None and self.lease.committed_s is not None:
            lines.append(f"committed {_ago(self.lease.committed_s)}")
        unseen = self.restarts + 1 > len(self.attempts)
        why = " (an attempt that was killed before a commit left no note)" if self.lease is not None and unseen else ""
        lines.append(f"attempts {len(self.attempts)}, restarts {self.restarts}{why}")
        for number, attempt in enumerate(self.attempts, start=1):
            lines += _lines(attempt, self._lives if number == len(self.attempts) else lambda process: False)
        return "\n".join(lines)


def status(folder: str | Path, now: float | None = None) -> Status:
    """Reads a run's folder, and changes nothing in it.

    Args:
      now: UNIX seconds; None: the present.

    Raises:
      ValueError: there is no such folder, or it holds no run.
    """
    place, now = Path(folder), time.time() if now is None else now
    if not place.is_dir():
        there = [path.name for path in place.parent.iterdir() if path.is_dir()] if place.parent.is_dir() else []
        near = difflib.get_close_matches(place.name, there, n=1)
        raise ValueError(f"there is no folder {place}" + (f"; nearest is {place.parent / near[0]}" if near else ""))
    config = place / "config.json"
    if not config.is_file() and not (place / NAME).is_dir():
        raise ValueError(f"{place} is no folder of a run: it has neither config.json nor {NAME}/")
    mine = place / "process_0" if (place / "process_0").is_dir() else place
    signs = [place / NAME, *(place / NAME).glob("*.jsonl"), *(mine / name for name in log_marks.LOGS)]
    seen = [path.stat().st_mtime for path in signs if path.exists()]
    saves = [path.name.removeprefix("step_") for path in (place / "checkpoints").glob("step_??????")]
    return Status(
        folder=place,
        attempts=tuple(_read(place)),
        step=log_marks.last_step(mine),
        steps=read_object(config, str(config)).get("steps") if config.is_file() else None,
        saved=max((int(number) for number in saves if number.isdigit()), default=None),
        age_s=now - max(seen) if seen else None,
    )


def _read(place: Path) -> list[Attempt]:
    """Returns the attempts that are noted in a run's folder, in order."""
    starts: dict[tuple[int, str], dict] = {}
    ends: dict[tuple[int, str], dict] = {}
    for file in sorted((place / NAME).glob("process_*.jsonl")):
        for note in _notes(file):
            (starts if note["event"] == "start" else ends)[note["attempt"], file.stem] = note
    found = []
    for number in sorted({number for number, _ in starts}):
        mine = [key for key in starts if key[0] == number]
        processes = [_process(starts[key], ends.get(key, {})) for key in mine]
        processes.sort(key=lambda one: one.index)
        found.append(Attempt(number=number, of=starts[mine[0]]["processes"], processes=tuple(processes)))
    return found


def _process(start: dict, end: dict) -> Process:
    return Process(
        index=start["process"],
        host=start["host"],
        pid=start["pid"],
        begun=start["time"],
        seconds=end.get("seconds", max(end["time"] - start["time"], 0.0)) if end else None,
        code=end.get("code"),
        why=end.get("why", ""),
    )


def _notes(file: Path) -> Iterator[dict]:
    """Yields the notes of a process. Omits a line that a crash cut short."""
    for line in file.read_bytes().split(b"\n"):
        try:
            note = json.loads(line)
        except ValueError:
            continue
        if isinstance(note, dict) and note.get("event") in ("start", "end"):
            yield note


def _lines(attempt: Attempt, lives: Callable[[Process], bool | None]) -> list[str]:
    """Returns a line of an attempt, and a line of each reason. `lives`: whether a process without an end is there."""
    begun = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(attempt.begun))
    lasted = "" if attempt.seconds is None else f", {_span(attempt.seconds)}"
    few = "" if len(attempt.processes) == attempt.of else f", {len(attempt.processes)} of them began"
    by: dict[str, list[int]] = {}
    for one in attempt.processes:
        by.setdefault(_outcome(one, lives), []).append(one.index)
    told = "; ".join(f"{word}: {_indices(indices, attempt.of)}" for word, indices in by.items())
    reasons = dict.fromkeys(one.why for one in attempt.processes if one.why)
    head = f"  {attempt.number}  {begun}{lasted}, processes {attempt.of}{few}; {told}"
    return [head, *(f"     {why}" for why in reasons)]


def _outcome(process: Process, lives: Callable[[Process], bool | None]) -> str:
    """Says how a process ended. Without an end it lives only in the newest attempt."""
    if process.code is not None:
        return f"exit code {process.code}"
    there = lives(process)
    return "killed" if there is False else "running" if there else "no end noted"


def _indices(indices: list[int], of: int) -> str:
    """Names processes, or counts them where they are many."""
    if len(indices) == of:
        return "all" if of > 1 else "its process"
    return ", ".join(map(str, indices)) if len(indices) <= _FEW else f"{len(indices)} processes"


def _ago(seconds: float) -> str:
    """Says how long ago something was, by two clocks that may differ."""
    return (
        f"{_span(max(seconds, 0.0))} ago"
        if seconds > -_CLOCKS_S
        else f"at a time {_span(-seconds)} ahead of this clock"
    )


def _span(seconds: float) -> str:
    """Returns a time in its largest fitting unit."""
    for size, unit in ((86400.0, "d"), (3600.0, "h"), (60.0, "min")):
        if seconds >= 2 * size:
            return f"{seconds / size:.1f} {unit}"
    return f"{seconds:.0f} s"


def bucket_status(text: str, now: float | None = None) -> Status:
    """Returns the status of the run in gs://BUCKET/NAME, as its newest whole commit has it.

    Args:
      now: UNIX seconds; None: the present.

    Raises:
      ValueError: there is no run, or every commit is damaged.
      Unreachable: the bucket does not answer.
    """
    objects, now = Objects(parse(text, "--status")), time.time() if now is None else now
    there = record.read(objects)
    if not there.generation:
        raise ValueError(f"--status={objects.address}: there is no run")
    held = Lease(
        holder=record.who(there.holder) if there.holder else "",
        live=bool(there.holder) and there.until > now,
        committed_s=None,
        starts=there.term,
    )
    renewed = now - (there.until - record.LEASE_S)
    for commit in there.commits:
        try:
            with tempfile.TemporaryDirectory() as folder:
                found = tree.read(objects, commit.tree)
                told = status(_status_files(objects, found, Path(folder)), now)
                held = replace(held, committed_s=now - commit.at)
                return replace(told, folder=str(objects.address), age_s=renewed, lease=held)
        except tree.Damaged:
            continue
    if there.commits:
        raise ValueError(f"--status={objects.address}: every commit of the run is damaged")
    return Status(folder=str(objects.address), attempts=(), step=0, steps=None, saved=None, age_s=renewed, lease=held)


def _status_files(objects: Objects, found: tree.Tree, folder: Path) -> Path:
    """Writes what a status needs of a run, with an empty folder for each saved step."""
    tree.fetch(objects, found, folder, lambda name: _STATUS_FILES.fullmatch(name) is not None)
    for name in found:
        if name.startswith("checkpoints/step_"):
            (folder / Path(name).parent).mkdir(parents=True, exist_ok=True)
    return folder
