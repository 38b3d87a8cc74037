"""kill -9 at ten random moments, resumed each time: the run ends as the one that nothing happened to, bit for bit.

The demo config with 32 prompts a step for 12 steps, saved every 3. Ten runs are each killed once, at a moment drawn
from a fixed seed: three while they start, seven between start and end; then one run is killed time and again. At last
a bit of the newest checkpoint is flipped: the one before is used, and the run still ends alike.
"""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

MINUTES = 6.0

SEEDS = tuple(range(10))
STARTING = 3  # so many are killed while they start; the others each in its own part of the run
STEPS, EVERY = 12, 3
COMMAND = ["-m", "jaxrl_post.main", "--config=configs/demo.py", "--resume", f"--config.steps={STEPS}",
           f"--config.checkpoint.every={EVERY}", "--config.scheduler.prompts=32", "--config.eval.prompts=16",
           "--config.eval.every=4"]
LIMIT_S = 600.0


def show(record) -> None:
    sys.path.insert(0, str(record.root))
    with tempfile.TemporaryDirectory() as folder:
        here = Path(folder)
        _finish(record, here / "cold")  # fills the compilation cache
        whole = here / "whole"
        start, seconds = _finish(record, whole)
        record.figure("uninterrupted_run.start_s", round(start, 2))
        record.figure("uninterrupted_run.seconds", round(seconds, 2))
        begun_over = 0
        for seed in SEEDS:
            run, noise = here / f"killed-{seed}", random.Random(seed)
            moment = (noise.random() - 1) * start if seed < STARTING else (
                (seed - STARTING + noise.random()) / (len(SEEDS) - STARTING) * (seconds - start))
            while not _killed(record, run, moment, start):  # it was faster this time, and has ended
                shutil.rmtree(run)
                moment *= 0.7
            steps = _steps(run)
            begun_over += not steps
            _finish(record, run)
            record.figure(f"kill_{seed}.seconds_after_start", round(moment, 2))
            record.figure(f"kill_{seed}.newest_step_then", max(steps, default=0))
            record.figure(f"kill_{seed}.what_differs", _differences(whole, run), equals=[])
            shutil.rmtree(run)
        record.figure("kills_before_the_first_save", begun_over, at_least=1, at_most=len(SEEDS) - 3)
        _again_and_again(record, here / "again", whole, seconds - start)
        _flipped(record, here / "flipped", whole)


def _again_and_again(record, run: Path, whole: Path, seconds: float) -> None:
    """One run, killed up to once for every seed, at some moment of a part of a run after each start that grows."""
    kills, seen = 0, []
    for seed in SEEDS:
        kills += _killed(record, run, random.Random(100 + seed).random() * (0.4 + 0.06 * seed) * seconds, 0.0)
        seen.append(max(_steps(run), default=0))
    _finish(record, run)
    record.figure("killed_again_and_again.kills", kills, at_least=5)
    record.figure("killed_again_and_again.newest_steps", seen)
    record.figure("killed_again_and_again.resumed_from_a_save", sum(map(bool, seen)), at_least=1)
    record.figure("killed_again_and_again.what_differs", _differences(whole, run), equals=[])


def _flipped(record, run: Path, whole: Path) -> None:
    """A whole run whose newest checkpoint then loses a bit: its end is lived through once more."""
    _finish(record, run)
    newest = run / "checkpoints" / f"step_{STEPS:06d}"
    largest = max((file for file in newest.rglob("*") if file.is_file()), key=lambda file: file.stat().st_size)
    data = bytearray(largest.read_bytes())
    data[random.Random(0).randrange(len(data))] ^= 1
    largest.write_bytes(data)
    said = _end(_begin(record, run))
    record.figure("flipped_byte.said", f"CHECKPOINT DAMAGED: step {STEPS} is not used" in said, equals=True)
    record.figure("flipped_byte.one_before_is_used", f"goes on after step {STEPS - EVERY}\n" in said, equals=True)
    record.figure("flipped_byte.moved_aside", newest.with_name(f"{newest.name}.damaged-1").is_dir(), equals=True)
    record.figure("flipped_byte.what_differs", _differences(whole, run), equals=[])


def _begin(record, run: Path) -> subprocess.Popen:
    """The same command begins a run and resumes it."""
    return subprocess.Popen([sys.executable, *COMMAND, f"--run-dir={run}"], cwd=record.root, text=True,
                            env={**os.environ, "JAX_COMPILATION_CACHE_DIR": str(run.parent / "cache")},
                            stdout=subprocess.PIPE, stderr=subprocess.STDOUT)


def _end(process: subprocess.Popen) -> str:
    """Waits for it; what it said."""
    try:
        said = process.communicate(timeout=LIMIT_S)[0]
    finally:
        process.kill()
    if process.returncode:
        raise RuntimeError(f"the run exited {process.returncode}:\n{said[-4000:]}")
    return said


def _started(process: subprocess.Popen, run: Path) -> None:
    """Waits until the run opens its metrics, or cuts them back."""
    file, begun = run / "metrics.jsonl", time.time()
    before = file.stat().st_mtime_ns if file.exists() else 0
    while process.poll() is None and (not file.exists() or file.stat().st_mtime_ns == before):
        if time.time() > begun + LIMIT_S:
            process.kill()
            raise RuntimeError(f"the run in {run} has not started after {LIMIT_S:g} s")
        time.sleep(0.02)


def _finish(record, run: Path) -> tuple[float, float]:
    """Begins or resumes a run and waits for its end: seconds to its start, and to its end."""
    begun = time.monotonic()
    process = _begin(record, run)
    _started(process, run)
    start = time.monotonic() - begun
    _end(process)
    return start, time.monotonic() - begun


def _killed(record, run: Path, moment: float, start: float) -> bool:
    """Begins or resumes a run and kills it `moment` seconds after its start, or before it where `moment` is negative:
    then `start` says how long a start takes. False when the run had ended by then."""
    process = _begin(record, run)
    if moment >= 0:
        _started(process, run)
    try:
        process.communicate(timeout=moment if moment >= 0 else start + moment)
    except subprocess.TimeoutExpired:
        process.send_signal(signal.SIGKILL)
        process.communicate()
    return process.returncode == -signal.SIGKILL


def _steps(run: Path) -> list[int]:
    return [int(path.name.removeprefix("step_")) for path in (run / "checkpoints").glob("step_??????")]


def _differences(one: Path, two: Path) -> list[str]:
    """Names of everything not timed in which two finished runs differ: files, metrics, summary, weights and moments."""
    import saved

    from jaxrl_post import metrics
    files = [{path.relative_to(run).as_posix(): path for path in run.rglob("*") if path.is_file()
              and "checkpoints" not in path.relative_to(run).parts} for run in (one, two)]
    out = sorted(files[0].keys() ^ files[1].keys())
    timed = ("metrics.jsonl", "summary.json", "config.json")
    out += [name for name in sorted(files[0].keys() & files[1].keys())
            if name not in timed and files[0][name].read_bytes() != files[1][name].read_bytes()]
    rows = [[json.dumps(metrics.deterministic(row), sort_keys=True) for row in metrics.read(run / "metrics.jsonl")]
            for run in (one, two)]
    out += ["deterministic metrics"] * (rows[0] != rows[1])
    told = [json.loads((run / "summary.json").read_text()) | {"seconds": 0} for run in (one, two)]
    out += ["summary.json"] * (told[0] != told[1])
    return out + saved.differing(*(run / "checkpoints" / f"step_{STEPS:06d}" / "arrays" for run in (one, two)))
