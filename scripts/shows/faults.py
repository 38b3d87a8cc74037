"""Killed, stopped, raised or hung at every fault point, and resumed: a run ends as the undisturbed one, bit for bit.

Three modes: synchronous, tail batching and pipelined. Each point of JAXRL_FAULT is reached with each kind of fault, then
the run is resumed by the same command. Further runs are killed at 20 random moments. A second process on a live run's
folder is refused. With a disk that is full at every save, a run loses nothing and its results are the same.

`--modes=sync,pipeline` and `--kinds=kill,hang` choose a part. Disks are filled in a mount namespace, which needs root.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from killed import Runs

MINUTES = 60.0
STEPS = 8
SHORT = (
    f"--config.steps={STEPS}",
    "--config.eval.prompts=4",
    "--config.eval.every=3",
    "--config.checkpoint.every=2",
    "--config.checkpoint.keep_last=2",
    "--config.watchdog.dispatch_s=6",
    "--config.watchdog.train_s=6",
    "--config.watchdog.reward_s=6",
    "--config.watchdog.save_s=6",
    "--config.watchdog.evaluate_s=6",
)
MODES = {
    "sync": ("--config=configs/demo.py", "--config.scheduler.prompts=8"),
    "tail_batching": ("--config=configs/demo_tail_batching.py", "--config.scheduler.prompts=8"),
    "pipeline": ("--config=configs/demo_pipeline.py", "--config.scheduler.prompts=8"),
}
COUNTS = {  # point -> which time; all come after the first save
    "dispatch": 14,
    "reward_start": 150,
    "reward_join": 20,
    "accumulate": 4,
    "commit": 4,
    "swap": 4,
    "publish": 4,
    "before_save": 2,
    "mid_save": 2,
    "after_save": 2,
    "prune": 1,
    "evaluation": 2,
}
CODES = {"kill": -9, "raise": 1, "hang": 42, "term": 42}
MOMENTS = {"sync": range(7), "tail_batching": range(7, 14), "pipeline": range(14, 20)}
LEFT = ("hang.txt", "hang.json")  # what a hang leaves, and an undisturbed run has not


def show(record) -> None:
    sys.path.insert(0, str(record.root))
    modes = record.options.get("modes", ",".join(MODES)).split(",")
    kinds = record.options.get("kinds", ",".join(CODES)).split(",")
    for mode in modes:
        with tempfile.TemporaryDirectory() as folder:
            runs = Runs(record, Path(folder), [*MODES[mode], *SHORT], STEPS)
            runs.finish("cold")
            start, seconds = runs.finish("whole")
            for kind in kinds:
                found = {
                    point: record.cached(f"{mode}.{kind}.{point}", lambda p=point, k=kind: _struck(runs, p, k))
                    for point in COUNTS
                }
                record.figure(f"{mode}.{kind}.points", len(found), equals=len(COUNTS))
                wrong = {point: one["code"] for point, one in found.items() if one["code"] != CODES[kind]}
                record.figure(f"{mode}.{kind}.wrong_exit_codes", wrong, equals={})
                differing = {point: one["differs"] for point, one in found.items() if one["differs"]}
                record.figure(f"{mode}.{kind}.what_differs", differing, equals={})
                print(
                    f"{mode} {kind}: exit codes {wrong or 'as expected'}, differences {differing or 'none'}", flush=True
                )
            differing = {seed: _killed(runs, seed, start, seconds) for seed in MOMENTS[mode]}
            record.figure(f"{mode}.random_moments", len(differing))
            record.figure(f"{mode}.random_moments.what_differs", {s: d for s, d in differing.items() if d}, equals={})
    with tempfile.TemporaryDirectory() as folder:
        runs = Runs(record, Path(folder), [*MODES["sync"], *SHORT], STEPS)
        runs.finish("whole")
        _second_process(record, runs)
        _full_disk(record, runs)


def _struck(runs: Runs, point: str, kind: str) -> dict:
    """Runs with a fault, then resumes. Returns the first exit code, and what differs from the undisturbed run."""
    name = f"{point}-{kind}"
    environment = {**runs.environment(), "JAXRL_FAULT": f"{point}:{COUNTS[point]}:{kind}"}
    done = subprocess.run(runs.begun(name), cwd=runs.root, env=environment, capture_output=True, text=True, timeout=300)
    runs.finish(name)
    for left in LEFT:
        (runs.here / name / left).unlink(missing_ok=True)
    differs = runs.differences(runs.here / "whole", runs.here / name)
    shutil.rmtree(runs.here / name)
    return {"code": done.returncode, "differs": differs}


def _killed(runs: Runs, seed: int, start: float, seconds: float) -> list[str]:
    """Kills a run at a moment of its seed, resumes it, and returns what differs."""
    name, share = f"moment-{seed}", (seed % 7 + 0.5) / 7
    while not runs.kill(name, share * (seconds - start), start):
        shutil.rmtree(runs.here / name)
        share *= 0.7
    runs.finish(name)
    differs = runs.differences(runs.here / "whole", runs.here / name)
    shutil.rmtree(runs.here / name)
    return differs


def _second_process(record, runs: Runs) -> None:
    """A second process on a live run's folder is refused, and the run ends as the undisturbed one."""
    environment = {**runs.environment(), "JAXRL_FAULT": "dispatch:5:hang"}
    first = subprocess.Popen(
        [*runs.begun("live"), "--config.watchdog.dispatch_s=60", "--config.watchdog.compile_s=120"],
        cwd=runs.root,
        env=environment,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    lock = runs.here / "live" / ".lock"
    while not (lock.is_file() and lock.read_text()) and first.poll() is None:
        time.sleep(0.1)
    second = subprocess.run(
        runs.begun("live"), cwd=runs.root, env=runs.environment(), capture_output=True, text=True, timeout=300
    )
    first.kill()
    first.wait()
    said = f"in use by process {first.pid} on host" in second.stderr
    record.figure("second_process.exit_code", second.returncode, equals=1)
    record.figure("second_process.names_the_first", said, equals=True)
    runs.finish("live")
    record.figure("second_process.what_differs", runs.differences(runs.here / "whole", runs.here / "live"), equals=[])


def _full_disk(record, runs: Runs) -> None:
    """Saves go to a disk of 64 KiB, on which every one fails. The run goes on, and its results are the same."""
    place = runs.here / "full"
    (place / "checkpoints").mkdir(parents=True)
    command = " ".join([*runs.begun("full"), "--config.checkpoint.max_failures=0"])
    script = f"mount -t tmpfs -o size=64k none {place}/checkpoints && {command}"
    done = subprocess.run(
        ["unshare", "-m", "sh", "-c", script],
        cwd=runs.root,
        env=runs.environment(),
        capture_output=True,
        text=True,
        timeout=600,
    )
    failed = done.stdout.count("CHECKPOINT FAILED")
    record.figure("full_disk.exit_code", done.returncode, equals=0)
    record.figure("full_disk.saves_that_failed", failed, at_least=STEPS // 2)
    names = ["rollouts/index.jsonl", "policy/model.safetensors", "rewards.jsonl", "scheduler_log.jsonl"]
    differing = [name for name in names if (place / name).read_bytes() != (runs.here / "whole" / name).read_bytes()]
    record.figure("full_disk.what_differs", differing, equals=[])
    record.figure("full_disk.left_in_checkpoints", os.listdir(place / "checkpoints"), equals=[])
