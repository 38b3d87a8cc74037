"""Clocks that jump by minutes to weeks, forwards and backwards, while a run goes on and between its starts: no bit changes.

An arm of the show `faults`. The clock of the process jumps (faulty_calls.py), and the monotonic one does not. A resumed run has a
clock behind the times of its own files.
"""

from __future__ import annotations

import os
import random
import re
import subprocess
import sys
import tempfile
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from faulty_calls import Faults, set_clock
from killed import Runs, steps

STEPS = 12
RUN = (
    *("--config=configs/demo.py", f"--config.steps={STEPS}", "--config.scheduler.prompts=8", "--config.eval.every=3"),
    *("--config.scheduler.group_size=4", "--config.eval.prompts=8", "--config.reward.workers=1"),
    *("--config.checkpoint.every=2", "--config.checkpoint.keep_last=2"),
)
BETWEEN_S = 0.15
HOUR, DAY = 3600, 86400
JUMPS = (-HOUR, HOUR, DAY, -DAY, 40 * DAY, -40 * DAY, 90, -90, 0)
STARTS = (("before_save:3:kill", 2 * HOUR), ("accumulate:5:kill", -HOUR), ("", -3 * DAY))  # fault, and the clock then
COMMANDS = (("watch", "{place}", "--once"), ("launch", "--status={place}"))


def arm(record) -> None:
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(2) as pool:
        here = Path(folder)
        runs, faults = Runs(record, here, RUN, STEPS), Faults(here / "library")
        runs.finish("whole")
        jumped = pool.submit(_jumped, runs, faults)
        resumed = pool.submit(_resumed, runs, faults)
        record.figure("clock.jumps", jumped.result(), at_least=20)
        record.figure("clock.starts", resumed.result(), equals=[[-9, 2 * HOUR], [-9, -HOUR], [0, -3 * DAY]])
        for name in ("jumped", "resumed"):
            place = here / name
            record.figure(f"clock.{name}.what_differs", runs.differences(here / "whole", place), equals=[])
            record.figure(f"clock.{name}.hangs", len(list(place.glob("hang.*"))), equals=0)
        said = [
            (word, ahead, _said(runs, faults, word, ahead)) for word in COMMANDS for ahead in (0, -5 * DAY, 5 * DAY)
        ]
    record.figure("clock.commands", len(said), equals=2 * 3)
    record.figure("clock.commands.failed", [one for *one, (code, _) in said if code], equals=[])
    negative = [line for *_, (_, text) in said for line in text.splitlines() if re.search(r"(?<![\w.])-\d", line)]
    record.figure("clock.commands.negative_times", negative, equals=[])


def _jumped(runs: Runs, faults: Faults) -> int:
    """Makes a run whose clock jumps all the time. Returns how often it did."""
    file, draw, jumps, over = runs.here / "jumps", random.Random(0), [], threading.Event()
    set_clock(file, 0)

    def jump() -> None:
        while not over.wait(BETWEEN_S):
            jumps.append(draw.choice(JUMPS))
            set_clock(file, jumps[-1])

    thread = threading.Thread(target=jump)
    thread.start()
    try:
        done = _run(runs, "jumped", faults.clock(file))
    finally:
        over.set()
        thread.join()
    if done.returncode:
        raise RuntimeError(f"the run whose clock jumped exited {done.returncode}:\n{done.stderr[-4000:]}")
    return len(jumps)


def _resumed(runs: Runs, faults: Faults) -> list[list[int]]:
    """Makes a run that is killed and resumed, each time by another clock. Its files have the times of the clock of their start.

    Returns exit code and clock of each start."""
    file, place, found = runs.here / "clock", runs.here / "resumed", []
    for fault, ahead in STARTS:
        set_clock(file, ahead)
        done = _run(runs, "resumed", faults.clock(file) | ({"JAXRL_FAULT": fault} if fault else {}))
        found.append([done.returncode, ahead])
        assert steps(place), f"the run has saved nothing before it met {fault}:\n{done.stderr[-2000:]}"
        for path in place.rglob("*"):
            os.utime(path, (time.time() + ahead,) * 2)
    return found


def _run(runs: Runs, name: str, variables: dict[str, str]) -> subprocess.CompletedProcess:
    return runs.met(name, 600, PYTHONPATH=str(runs.root), JAX_PLATFORMS="cpu", **variables)


def _said(runs: Runs, faults: Faults, words: tuple[str, ...], ahead: int) -> tuple[int, str]:
    """Returns exit code and words of a command about the resumed run, by a clock of its own."""
    file, place = runs.here / f"reader{ahead}", runs.here / "resumed"
    set_clock(file, ahead)
    done = subprocess.run(
        [sys.executable, "-m", "jaxrl_post", *(word.format(place=place) for word in words)],
        cwd=runs.root,
        env=runs.environment() | {"PYTHONPATH": str(runs.root), "JAX_PLATFORMS": "cpu"} | faults.clock(file),
        capture_output=True,
        text=True,
        timeout=120,
    )
    return done.returncode, done.stdout + done.stderr
