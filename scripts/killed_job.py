"""One of two processes of a job is killed at moments drawn from seeds: the other ends by itself, and the job goes on.

An arm of the show `faults`. No launcher ends the other process or cleans up behind it. Before the two have joined, neither
knows of the other, and there the launcher's own limit ends it. The same command resumes the job after each kill.
At its end the job equals one that nobody disturbed, bit for bit.
"""

from __future__ import annotations

import os
import random
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import joined_jobs
from killed import differences

STEPS = 32
ENDS_S = 10.0  # for the other process: it hears of the loss at once, and jax's abort waits 3 s (parallel/liveness.py)
GONE_S = 5.0  # for reward workers of both to end
# After which a launcher tells a process to end that waits for another one to join: 120 s outside of this show.
TERM_S = 3.0
SAVE_S, FEW = 0.3, 3  # a save takes about so long; so many steps hold the moment of a kill that is no save
STOP_S = 30.0  # from a launcher's SIGTERM to its SIGKILL
LIMIT_S = 300.0
OPTIONS = (f"--config.steps={STEPS}", "--config.mesh.data=1", "--config.mesh.fsdp=2", *joined_jobs.SMALL)
MOMENTS = ("joining", "starting", "stepping", "saving", "between_states", "saved_by_0", "stepping")
FAULTS = {(0, "between_states"): "mid_save", (1, "between_states"): "mid_save", (0, "saved_by_0"): "after_save"}


@dataclass(frozen=True)
class Kill:
    """A process that is killed, and when: `moment` names one of MOMENTS, and `noise` in [0, 1) says where within it."""

    process: int
    moment: str
    noise: float


KILLS = [
    Kill(process, moment, random.Random(f"{place} {process}").random())
    for place, moment in enumerate(MOMENTS)
    for process in (0, 1)
]


def arm(record) -> None:
    with tempfile.TemporaryDirectory() as folder:
        job = Job(record.root, Path(folder))
        for name in ("cold", "whole"):  # the first one fills the compilation cache
            job.finish(name)
        found = [job.struck("killed", kill) for kill in KILLS]
        job.finish("killed")
        differs = differences(job.here / "whole", job.here / "killed", STEPS)
    joined, apart = ([one for one in found if one["joined"] == both] for both in (True, False))
    record.figure("killed_job.kills", [sum(k.process == p for k in KILLS) for p in (0, 1)], equals=[len(MOMENTS)] * 2)
    record.figure("killed_job.codes", sorted({one["code"] for one in found}), equals=[-signal.SIGKILL])
    record.figure("killed_job.joined", len(joined), at_least=12)
    record.figure("killed_job.other_ended_by_itself", sum(one["other"] == 42 for one in joined), equals=len(joined))
    record.figure("killed_job.other_names_the_lost_one", sum(one["named"] for one in joined), equals=len(joined))
    record.figure("killed_job.most_seconds_until_it_ended", max(one["seconds"] for one in joined), at_most=ENDS_S)
    record.figure("killed_job.before_joining", len(apart), at_most=2)
    record.figure("killed_job.before_joining.wrong_codes", [c for one in apart if (c := one["other"]) != 42], equals=[])
    record.figure("killed_job.left_running", sum(one["left"] for one in found), equals=0)
    record.figure("killed_job.steps_of_resumption", [one["step"] for one in found])
    record.figure("killed_job.what_differs", differs, equals=[])


class Job:
    """Jobs of one command in the folder `here`, with a compilation cache of their own."""

    def __init__(self, root: Path, here: Path):
        self.here, self._root, self._cache = here, root, here / "cache"
        self._options = [f"--config={root / 'configs' / 'demo' / 'sharded.py'}", *OPTIONS]
        self._join_s = self._start_s = self._step_s = 0.0

    def finish(self, name: str) -> None:
        """Begins or resumes a job, waits for its end, and measures its seconds: to joining, from there to its start, of a step."""
        place, begun = self.here / name, time.monotonic()
        before, both = _Seen(place), self._begin(place)
        _wait(lambda: _Seen(place).joined_since(before), both)
        joined = time.monotonic()
        _wait(lambda: _Seen(place).metrics != before.metrics, both)
        started = time.monotonic()
        codes = [one.wait(LIMIT_S) for one in both]
        if any(codes):
            raise RuntimeError(f"the job exited {codes}:\n{joined_jobs.said(place)}")
        self._join_s, self._start_s = joined - begun, started - joined
        self._step_s = (time.monotonic() - started) / STEPS

    def struck(self, name: str, kill: Kill) -> dict:
        """Begins or resumes a job, kills one process, and returns what became of the other."""
        place = self.here / name
        log = Path(f"{place}.{1 - kill.process}.log")
        said = len(log.read_text()) if log.exists() else 0
        point = FAULTS.get((kill.process, kill.moment))
        fault = {"JAXRL_FAULT": f"{point}:{1 + round(kill.noise)}:kill"} if point else {}
        before, both = _Seen(place), self._begin(place, fault, kill.process)
        victim, other = both[kill.process], both[1 - kill.process]
        if not point:
            self._await(kill, place, before, both)
            victim.kill()
        code, ended = victim.wait(LIMIT_S), time.monotonic()
        joined = _Seen(place).joined_since(before)
        _end(other, ENDS_S * 3 if joined else TERM_S)
        seconds = time.monotonic() - ended
        found = {
            "process": kill.process,
            "moment": kill.moment,
            "code": code,
            "joined": joined,
            "other": other.returncode,
            "named": f"process {kill.process} of 2 is lost" in log.read_text()[said:],
            "seconds": round(seconds, 2),
            "left": self._left(),
            "step": max(_Seen(place).steps, default=0),
        }
        print(f"killed_job {found}", flush=True)
        return found

    def _begin(
        self, place: Path, fault: joined_jobs.Variables | None = None, victim: int = 0
    ) -> list[subprocess.Popen]:
        command, given = joined_jobs.started(self._root, "explicit", 2, place, self._options, self._cache)
        given[victim] |= fault or {}
        return [subprocess.Popen(command, env={**os.environ, **one}, start_new_session=True) for one in given]

    def _await(self, kill: Kill, place: Path, before: _Seen, both: Sequence[subprocess.Popen]) -> None:
        """Waits until the moment of a kill: at the latest what the folder shows, as a job may be faster than measured."""
        if kill.moment == "joining":
            return time.sleep(kill.noise * self._join_s)
        _wait(lambda: _Seen(place).joined_since(before), both)
        if kill.moment == "starting":
            until = time.monotonic() + kill.noise * self._start_s
            return _wait(lambda: time.monotonic() > until or _Seen(place).metrics != before.metrics, both)
        _wait(lambda: _Seen(place).metrics != before.metrics, both)
        if kill.moment == "stepping":
            until = time.monotonic() + kill.noise * FEW * self._step_s
            _wait(lambda: time.monotonic() > until or len(_Seen(place).steps - before.steps) >= FEW, both)
        elif kill.moment == "saving":
            _wait(lambda: _Seen(place).parts, both)
            time.sleep(kill.noise * SAVE_S)
        else:
            _wait(lambda: _Seen(place).steps - before.steps, both)

    def _left(self) -> int:
        """Returns how many processes are left that any job began, GONE_S after its end."""
        until = time.monotonic() + GONE_S
        while (left := _with_text(f"JAX_COMPILATION_CACHE_DIR={self._cache}")) and time.monotonic() < until:
            time.sleep(0.1)
        return len(left)


class _Seen:
    """What a job's folder shows: starts of each process, the newest change of its metrics, steps saved and begun."""

    def __init__(self, place: Path):
        notes = [place / "attempts" / f"process_{index}.jsonl" for index in (0, 1)]
        self.starts = [note.read_text().count('"event": "start"') if note.exists() else 0 for note in notes]
        metrics = place / "process_0" / "metrics.jsonl"
        self.metrics = metrics.stat().st_mtime_ns if metrics.exists() else 0
        names = os.listdir(place / "checkpoints") if (place / "checkpoints").is_dir() else []
        self.parts = [name for name in names if name.endswith(".part")]
        self.steps = {int(name[5:]) for name in names if name.startswith("step_") and name[5:].isdecimal()}

    def joined_since(self, before: _Seen) -> bool:
        return all(now > then for now, then in zip(self.starts, before.starts, strict=True))


def _wait(seen: Callable[[], object], both: Sequence[subprocess.Popen]) -> None:
    """Waits until something is seen of a job.

    Raises:
      RuntimeError: it has ended by then, or too much time went by.
    """
    until = time.monotonic() + LIMIT_S
    while not seen():
        if any(one.poll() is not None for one in both) or time.monotonic() > until:
            raise RuntimeError(f"the job ended, or did not come so far: exit codes {[one.poll() for one in both]}")
        time.sleep(0.002)


def _end(process: subprocess.Popen, limit_s: float) -> None:
    """Waits for the end of a process, and ends it as a launcher does where it takes longer: by SIGTERM, then by SIGKILL."""
    for late in (process.terminate, process.kill, lambda: None):
        try:
            process.wait(limit_s)
            return
        except subprocess.TimeoutExpired:
            late()
            limit_s = STOP_S


def _with_text(text: str) -> list[int]:
    """Returns the processes of this machine whose environment holds a text."""
    found = []
    for place in Path("/proc").glob("[0-9]*/environ"):
        try:
            found += [int(place.parent.name)] * (text.encode() in place.read_bytes())
        except OSError:  # it has ended, or is another's
            continue
    return found
