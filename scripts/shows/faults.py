"""Killed, stopped, raised or hung at every fault point, and resumed: a run ends as the undisturbed one, bit for bit.

Three modes: synchronous, tail batching and pipelined. For each kind of fault, one run meets it at every point of
JAXRL_FAULT, one after the other. After each fault the same command resumes the run, which saves before it meets the next.
Further runs are killed at 20 random moments. A second process on a live run's folder is refused. With a disk that is full
at every save, a run loses nothing and its results are the same. Reward workers are killed, as for memory: their rollouts
are tried once more, and no other score changes. One of two processes of a job is killed at random moments: the other ends.
The clock jumps by up to 40 days, within a run and between its starts. Renames fail, and writes find the disk full, at every kind
of file that a run leaves: it says so, and resumes to the same bits.

`--arms=clock,renames` chooses arms. `--modes=sync,pipeline` and `--kinds=kill,hang` choose a part of the arm `points`. Disks are
filled in a mount namespace, which needs root, and by a library in front of libc, which needs a C compiler.
"""

from __future__ import annotations

import os
import random
import shutil
import subprocess
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import failing_files
import jumping_clock
import killed_job
import killed_reward_workers
from killed import Runs, steps

MINUTES = 50.0
SOURCES = ("scripts/faulty_calls.c",)
STEPS = 48
DEADLINE_S = 12
SHORT = (
    f"--config.steps={STEPS}",
    "--config.scheduler.prompts=8",
    "--config.eval.prompts=4",
    "--config.eval.every=3",
    "--config.checkpoint.every=2",
    "--config.checkpoint.keep_last=2",
    *(f"--config.watchdog.{phase}_s={DEADLINE_S}" for phase in ("dispatch", "train", "reward", "save", "evaluate")),
)
MODES = {  # a pipeline with this staleness publishes, and so saves, every other step
    "sync": ("--config=configs/demo.py",),
    "tail_batching": ("--config=configs/demo/tail_batching.py",),
    "pipeline": ("--config=configs/demo/pipeline.py", "--config.scheduler.max_staleness=1"),
}
COUNTS = {  # point -> which time after a start; each comes after a save, and two or three steps later
    "dispatch": 40,
    "before_save": 2,
    "reward_start": 260,
    "mid_save": 2,
    "accumulate": 4,
    "prune": 2,
    "swap": 4,
    "evaluation": 2,
    "commit": 4,
    "after_save": 2,
    "reward_join": 26,
    "publish": 4,
}
TRIES = 3  # at one point, until a save lay before the fault
CODES = {"kill": -9, "raise": 1, "hang": 42, "term": 42}
MOMENTS = {"sync": range(7), "tail_batching": range(7, 14), "pipeline": range(14, 20)}
LEFT = ("hang.txt", "hang.json")  # what a hang leaves, and an undisturbed run has not


def show(record) -> None:
    arms = {
        "points": _points,
        "folder": _folder,
        "reward_workers": killed_reward_workers.arm,
        "job": killed_job.arm,
        "clock": jumping_clock.arm,
        "renames": failing_files.renames,
        "full_disks": failing_files.full_disks,
    }
    chosen = record.options.get("arms", ",".join(arms)).split(",")
    if unknown := sorted({*chosen} - arms.keys()):
        raise ValueError(f"--arms: there is no arm {unknown[0]!r}; arms are {', '.join(arms)}")
    for name in chosen:
        arms[name](record)


def _points(record) -> None:
    """Runs meet faults at every point and at random moments, and are resumed."""
    modes = record.options.get("modes", ",".join(MODES)).split(",")
    kinds = record.options.get("kinds", ",".join(CODES)).split(",")
    for mode in modes:
        with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(3) as pool:
            runs = Runs(record, Path(folder), [*MODES[mode], *SHORT], STEPS)
            runs.finish("cold")  # fills the compilation cache
            start, seconds = runs.finish("whole")
            work = {kind: lambda kind=kind: _struck_everywhere(runs, kind) for kind in kinds}
            work["moments"] = lambda mode=mode: _killed_at(runs, MOMENTS[mode], start, seconds)
            found = pool.map(lambda key, mode=mode, work=work: record.cached(f"{mode}.{key}", work[key]), work)
            for key, one in zip(work, found, strict=True):
                _say(record, mode, key, one)


def _folder(record) -> None:
    """A folder in which another process writes, and one on a disk that is full at every save."""
    with tempfile.TemporaryDirectory() as folder:
        runs = Runs(record, Path(folder), [*MODES["sync"], *SHORT], STEPS)
        runs.finish("whole")
        _second_process(record, runs)
        _full_disk(record, runs)


def _say(record, mode: str, key: str, found: dict) -> None:
    if key == "moments":
        record.figure(f"{mode}.random_moments", len(found["codes"]), equals=len(MOMENTS[mode]))
        record.figure(f"{mode}.random_moments.exit_codes", found["codes"], equals=[-9] * len(MOMENTS[mode]))
    else:
        record.figure(f"{mode}.{key}.points", len(found["codes"]), equals=len(COUNTS))
        wrong = {point: codes for point, codes in found["codes"].items() if {*codes} != {CODES[key]}}
        record.figure(f"{mode}.{key}.wrong_exit_codes", wrong, equals={})
        record.figure(f"{mode}.{key}.faults", sum(map(len, found["codes"].values())))
        record.figure(f"{mode}.{key}.saved_nothing_before", found["saved_nothing"], equals=[])
    record.figure(f"{mode}.{key}.steps_of_resumption", found["steps"])
    record.figure(f"{mode}.{key}.what_differs", found["differs"], equals=[])
    print(f"{mode} {key}: {found}", flush=True)


def _struck_everywhere(runs: Runs, kind: str) -> dict:
    """Lets one run meet the fault at every point, resumes it after each, and compares its end.

    Points are met in the order of `COUNTS`, which begins elsewhere for each kind. A run that is told to stop saves then,
    so it need not run as long before. A save is written in the background: where the fault came before its end, the run
    meets the same fault again.
    """
    here, first, often = runs.here / kind, 3 * list(CODES).index(kind), 2 if kind == "term" else 1
    codes, at = {}, [0]
    for point in [*list(COUNTS)[first:], *list(COUNTS)[:first]]:
        for _ in range(TRIES):
            done = runs.met(kind, 300, JAXRL_FAULT=f"{point}:{COUNTS[point] // often}:{kind}")
            codes.setdefault(point, []).append(done.returncode)
            for left in LEFT:
                (here / left).unlink(missing_ok=True)
            if max(steps(here), default=0) > at[-1]:
                break
        at.append(max(steps(here), default=0))
    runs.finish(kind)
    differs = runs.differences(runs.here / "whole", here)
    shutil.rmtree(here)
    saved_nothing = [point for point, old, new in zip(codes, at[:-1], at[1:], strict=True) if new <= old]
    return {"codes": codes, "steps": at[1:], "saved_nothing": saved_nothing, "differs": differs}


def _killed_at(runs: Runs, seeds: range, start: float, seconds: float) -> dict:
    """Kills one run at a moment drawn from each seed, resumes it after each, and compares its end.

    Every third moment lies within the start. The others lie in the first half of the steps that are left.
    """
    here, name = runs.here / "moments", "moments"
    codes, at = [], [0]
    for seed in seeds:
        noise, left = random.Random(seed).random(), (STEPS - at[-1]) / STEPS * (seconds - start)
        codes.append(-9 if runs.kill(name, (noise - 1) * start if seed % 3 == 2 else noise * left / 2, start) else 0)
        at.append(max(steps(here), default=0))
    runs.finish(name)
    differs = runs.differences(runs.here / "whole", here)
    shutil.rmtree(here)
    return {"codes": codes, "steps": at[1:], "differs": differs}


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
    second = runs.met("live", 300)
    first.kill()
    first.wait()
    said = f"in use by process {first.pid} on host" in second.stderr
    record.figure("second_process.exit_code", second.returncode, equals=1)
    record.figure("second_process.names_the_first", said, equals=True)
    runs.finish("live")
    record.figure("second_process.what_differs", runs.differences(runs.here / "whole", runs.here / "live"), equals=[])


def _full_disk(record, runs: Runs) -> None:
    """Saves go to a disk of 64 KiB, on which every one fails. The run goes on, its results are the same, and it says at its end
    that nothing was saved."""
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
    record.figure("full_disk.exit_code", done.returncode, equals=1)
    record.figure("full_disk.says_it_was_the_last", "it was the last save of the run" in done.stderr, equals=True)
    record.figure("full_disk.saves_that_failed", failed, at_least=STEPS // 2)
    names = ["rollouts/index.jsonl", "policy/model.safetensors", "rewards.jsonl", "scheduler_log.jsonl"]
    differing = [name for name in names if (place / name).read_bytes() != (runs.here / "whole" / name).read_bytes()]
    record.figure("full_disk.what_differs", differing, equals=[])
    record.figure("full_disk.left_in_checkpoints", os.listdir(place / "checkpoints"), equals=[])
