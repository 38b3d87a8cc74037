"""Jobs of several processes whose run lies in a bucket: killed by SIGKILL, one process or all, and begun again by themselves."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import joined_jobs
from bucket_runs import BucketRuns

_POLL_S = 0.05
_LATER_S = 1.5  # at most so long after a commit
ALL = -1


@dataclass(frozen=True, kw_only=True)
class Kill:
    """Which process gets a signal (ALL: every one), and the step that is committed then. Step 0: while the job starts."""

    process: int
    step: int
    by: int = signal.SIGKILL


class BucketJobs:
    """Jobs in a bucket, all on this machine.

    Args:
      runs: where they lie, and through which port processes reach it.
    """

    def __init__(self, runs: BucketRuns, processes: int, options: Sequence[str]):
        self.runs, self._processes, self._options = runs, processes, options
        self.damages: list[list[str]] = []  # what was wrong with the commits after each kill
        self._scratch = Path()
        self.found: list[int] = []  # the newest committed step at each kill

    def ended(self, name: str, kills: Sequence[Kill] = ()) -> int:
        """Runs a job to its end and returns its exit code. Each attempt is killed as `kills` say, in order."""
        given = self.runs.environment()
        variables = {name: given[name] for name in ("STORAGE_EMULATOR_HOST", "TMPDIR")}
        self._scratch = Path(variables["TMPDIR"])
        killer = threading.Thread(target=self._kill, args=(name, kills, random.Random(len(kills))), daemon=True)
        killer.start()
        place = self.runs.here / name
        job = joined_jobs.started(
            self.runs.root,
            "kubernetes",
            self._processes,
            place,
            self._options,
            self.runs.here / "cache-job",
            self.runs.url(name),
            variables,
        )
        code = joined_jobs.run(job, len(kills))
        killer.join(timeout=30)
        return code

    def _kill(self, name: str, kills: Sequence[Kill], noise: random.Random) -> None:
        before: dict[int, int] = {}
        for kill in kills:
            while not (there := self._numbers(name, before)) or max(self.runs.steps(name), default=0) < kill.step:
                time.sleep(_POLL_S)
            time.sleep(noise.random() * _LATER_S)
            for index, number in there.items():
                if kill.process in (index, ALL):
                    os.kill(number, kill.by)
            while any(map(joined_jobs.is_there, there.values())):  # they may still commit
                time.sleep(_POLL_S)
            self.found.append(max(self.runs.steps(name), default=0))
            self.damages.append(self.runs.damages(name) if self.found[-1] else [])
            before = there

    def _numbers(self, name: str, before: dict[int, int]) -> dict[int, int]:
        """Returns the processes of the present attempt by their index, once all of them have begun."""
        from jaxrl_post.runs import attempts

        found = {}
        for place in self._scratch.glob(f"*/{name}-*/*-*"):
            index = int(place.name.rpartition("-")[2]) if place.name.rpartition("-")[2].isdecimal() else ALL
            noted: Sequence[attempts.Attempt] = ()
            with contextlib.suppress(ValueError):  # it is being fetched
                noted = attempts.status(place).attempts if (place / attempts.NAME).is_dir() else ()
            found |= {
                one.index: one.pid for last in noted[-1:] for one in last.processes if one.index == index and one.lives
            }
        fresh = not {*found.values()} & {*before.values()}
        return found if len(found) == self._processes and fresh else {}
