"""Runs that are killed and resumed by the same command, and what they differ in from an undisturbed run."""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

LIMIT_S = 600.0
CONVERSING = (  # a small pipelined run of conversations, which is soon in the middle of some
    "--config.scheduler.name=pipeline",
    "--config.scheduler.max_staleness=2",
    "--config.scheduler.ahead=8",
    "--config.scheduler.max_unscored=24",
    "--config.scheduler.prompts=8",
    "--config.scheduler.group_size=4",
    "--config.engine.slots=16",
    "--config.engine.row_sizes=(64,)",
    "--config.eval.prompts=4",
    "--config.checkpoint.keep_last=5",
    "--config.environment.delay=20",
)
_APART = {"attempts", "checkpoints", "rewards.log"}
LAST_START = {
    "seconds": 0,
    "device_time": {},
    "mode": {},
    "tokens": 0,
    "resumed_at": 0,
}  # in summary.json, of a run's last start
_TIMED = ("summary.json", "config.json", "report.html")


class Runs:
    """Runs of one command, `python -m jaxrl_post.main` with `arguments`, which ends at optimizer step `last`.

    All lie in the folder `here`, with a compilation cache of their own.
    """

    def __init__(self, record, here: Path, arguments: Sequence[str], last: int):
        self._record, self._last, self.here, self.root = record, last, here, record.root
        self._command = [sys.executable, "-m", "jaxrl_post.main", "--resume", *arguments]

    def killed_at(self, seeds: Sequence[int], starting: int) -> tuple[Path, float]:
        """Returns the uninterrupted run, its seconds from its start on, and one run for each seed, killed once.

        Each moment is drawn from its seed. The first `starting` runs are killed while they start, each other run in its
        own part.
        """
        self.finish("cold")  # fills the compilation cache
        whole, start, seconds = self.here / "whole", *self.finish("whole")
        record = self._record
        record.figure("uninterrupted_run.start_s", round(start, 2))
        record.figure("uninterrupted_run.seconds", round(seconds, 2))
        begun_over = 0
        for seed in seeds:
            run, noise = self.here / f"killed-{seed}", random.Random(seed)
            moment = (
                (noise.random() - 1) * start
                if seed < starting
                else ((seed - starting + noise.random()) / (len(seeds) - starting) * (seconds - start))
            )
            while not self.kill(run.name, moment, start):  # the run was faster this time and has ended
                shutil.rmtree(run)
                moment *= 0.7
            found = steps(run)
            begun_over += not found
            self.finish(run.name)
            record.figure(f"kill_{seed}.seconds_after_start", round(moment, 2))
            record.figure(f"kill_{seed}.newest_step_then", max(found, default=0))
            record.figure(f"kill_{seed}.what_differs", self.differences(whole, run), equals=[])
            shutil.rmtree(run)
        record.figure("kills_before_the_first_save", begun_over, at_least=1, at_most=len(seeds) - 3)
        return whole, seconds - start

    def begun(self, name: str) -> list[str]:
        """Returns the command that begins a run, or resumes it."""
        return [*self._command, f"--run-dir={self.here / name}"]

    def environment(self) -> dict[str, str]:
        return {**os.environ, "JAX_COMPILATION_CACHE_DIR": str(self.here / "cache")}

    def begin(self, name: str) -> subprocess.Popen:
        return subprocess.Popen(
            self.begun(name),
            cwd=self._record.root,
            text=True,
            env=self.environment(),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
        )

    def met(self, name: str, timeout_s: float = LIMIT_S, **fault: str) -> subprocess.CompletedProcess:
        """Begins or resumes a run with a fault among its variables, and waits for its end, whatever that is."""
        env = self.environment() | fault
        return subprocess.run(
            self.begun(name), cwd=self.root, env=env, capture_output=True, text=True, timeout=timeout_s
        )

    def finish(self, name: str, limit_s: float = LIMIT_S) -> tuple[float, float]:
        """Begins or resumes a run and waits for its end. Returns the seconds to its start, and to its end."""
        begun = time.monotonic()
        process = self.begin(name)
        _started(process, self.here / name)
        start = time.monotonic() - begun
        end(process, limit_s)
        return start, time.monotonic() - begun

    def kill(self, name: str, moment: float, start: float) -> bool:
        """Begins or resumes a run and kills it `moment` seconds after its start, or before it where `moment` is
        negative.

        Then `start` says how long a start takes. Returns False if the run had ended by then.
        """
        process = self.begin(name)
        if moment >= 0:
            _started(process, self.here / name)
        try:
            process.communicate(timeout=moment if moment >= 0 else start + moment)
        except subprocess.TimeoutExpired:
            process.send_signal(signal.SIGKILL)
            process.communicate()
        return process.returncode == -signal.SIGKILL

    def differences(self, one: Path, two: Path) -> list[str]:
        """Returns what `differences` does, of two finished runs of this command."""
        return differences(one, two, self._last)


def differences(one: Path, two: Path, last: int) -> list[str]:
    """Returns the names of everything not timed in which two runs differ that finished at step `last`.

    These are files, metrics, weights and moments, of every process. Attempts are left out.
    """
    import saved

    files = [
        {
            path.relative_to(run).as_posix(): path
            for path in run.rglob("*")
            if path.is_file() and not _APART & {*path.relative_to(run).parts}
        }
        for run in (one, two)
    ]
    out = sorted(files[0].keys() ^ files[1].keys())
    for name in sorted(files[0].keys() & files[1].keys()):
        pair = [found[name] for found in files]
        if pair[0].name == "metrics.jsonl":
            out += [f"deterministic {name}"] * (_rows(pair[0]) != _rows(pair[1]))
        elif pair[0].name not in _TIMED and pair[0].read_bytes() != pair[1].read_bytes():
            out.append(name)
    told = [json.loads((run / "summary.json").read_text()) | LAST_START for run in (one, two)]
    out += ["summary.json"] * (told[0] != told[1])
    return out + saved.differing(*(run / "checkpoints" / f"step_{last:06d}" / "arrays" for run in (one, two)))


def compared(one: Path, two: Path) -> tuple[int, list[str]]:
    """Returns how many files of rollouts, policy and decisions a run has, and those that another has with other bytes."""
    names = sorted(
        path.relative_to(one)
        for pattern in ("rollouts/*", "policy/*", "scheduler_log.jsonl")
        for path in one.rglob(pattern)
    )
    return len(names), [str(name) for name in names if (one / name).read_bytes() != (two / name).read_bytes()]


def _rows(file: Path) -> list[str]:
    """Returns what was not timed of every row of a metrics.jsonl."""
    from jaxrl_post.runs import metric_rows

    return [json.dumps(metric_rows.deterministic(row), sort_keys=True) for row in metric_rows.read(file)]


def end(process: subprocess.Popen, limit_s: float = LIMIT_S) -> str:
    """Waits for the process and returns its output."""
    try:
        said = process.communicate(timeout=limit_s)[0]
    finally:
        process.kill()
    if process.returncode:
        raise RuntimeError(f"the run exited {process.returncode}:\n{said[-4000:]}")
    return said


def steps(run: Path) -> list[int]:
    """Returns the steps that the run has saved."""
    return [int(path.name.removeprefix("step_")) for path in (run / "checkpoints").glob("step_??????")]


def _started(process: subprocess.Popen, run: Path) -> None:
    """Waits until the run opens its metrics, or cuts them back."""
    file, begun = run / "metrics.jsonl", time.time()
    before = file.stat().st_mtime_ns if file.exists() else 0
    while process.poll() is None and (not file.exists() or file.stat().st_mtime_ns == before):
        if time.time() > begun + LIMIT_S:
            process.kill()
            raise RuntimeError(f"the run in {run} has not started after {LIMIT_S:g} s")
        time.sleep(0.02)
