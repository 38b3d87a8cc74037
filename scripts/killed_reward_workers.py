"""Reward workers are killed for memory, at random moments: by SIGKILL, as the kernel's out-of-memory killer does.

An arm of the show `faults`. First a pool alone, whose rollouts have known scores. Then a run, whose end is compared with
that of an undisturbed one.
"""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from pathlib import Path

import killed
import numpy as np

GROUPS, SIZE, WORKERS = 40, 8, 3
KILLS, RUN_KILLS = 60, 20
LIMIT_S = 240.0
GRADER = """
import os, signal, time

def score(data_source, solution_str, ground_truth, extra_info):
    number = int(solution_str)
    with open({calls!r}, "a") as file:
        print(number, file=file)
    time.sleep(0.01 + 0.005 * (number % 7))
    if number % 40 == 39:  # needs more memory than there is, every time
        os.kill(os.getpid(), signal.SIGKILL)
    return number / 8
"""
SLOW = """
import time
from jaxrl_post.rewards import math

def score(data_source, solution_str, ground_truth, extra_info):
    time.sleep(0.02)
    return math.exact(data_source, solution_str, ground_truth, extra_info)
"""
RUN = (
    *("-m", "jaxrl_post.main", "--config=configs/demo.py", "--config.steps=12", "--config.scheduler.prompts=8"),
    *("--config.scheduler.group_size=4", "--config.eval.prompts=8", "--config.reward.workers=2"),
)


def arm(record) -> None:
    with tempfile.TemporaryDirectory() as folder:
        _pool(record, Path(folder))
        _run(record, Path(folder))


def _children(parent: int) -> list[int]:
    done = subprocess.run(["ps", "-o", "pid=,args=", "--ppid", str(parent)], capture_output=True, text=True)
    return [int(line.split()[0]) for line in done.stdout.splitlines() if "rewards.worker import" in line]


def _kills(parent: int, times: int, seed: int, between_s: float, stopped: threading.Event, struck: list) -> None:
    """Kills one worker of a process at each of some random moments, also one that only starts."""
    draw = random.Random(seed)
    while len(struck) < times and not stopped.wait(draw.uniform(0, 2 * between_s)):
        if workers := _children(parent):
            victim = draw.choice(workers)
            try:
                os.kill(victim, signal.SIGKILL)
            except ProcessLookupError:
                continue
            struck.append(victim)


def _group(at: int):
    """Returns a group whose rollouts have one token each: their number."""
    from jaxrl_post.ring.types import Finish, Group, Prompt, Rollout, RolloutId

    prompt = Prompt(id=f"p{at}", tokens=[1], answer="gold", source="src")
    rollouts = tuple(
        Rollout.written(RolloutId(0, "train", 0, prompt.id, sample), prompt, [at * SIZE + sample], Finish.EOS)
        for sample in range(SIZE)
    )
    return Group(prompt=prompt, rollouts=rollouts, rewards=np.zeros(SIZE), scored=np.zeros(SIZE, bool))


def _pool(record, folder: Path) -> None:
    """A pool whose workers are killed scores each rollout by hand's value, or leaves it unscored after two calls."""
    from jaxrl_post.rewards.pool import Graders, Pool

    file, calls, stopped, struck = folder / "grader.py", folder / "calls", threading.Event(), []
    file.write_text(GRADER.format(calls=str(calls)))
    groups = [_group(at) for at in range(GROUPS)]
    begun, wrong, unscored = time.monotonic(), [], []
    with Pool(
        Graders(functions=[f"{file}:score"], workers=WORKERS, timeout_s=20.0), lambda tokens, **how: str(tokens[0])
    ) as pool:
        killer = threading.Thread(target=_kills, args=(os.getpid(), KILLS, 0, 0.15, stopped, struck), daemon=True)
        killer.start()
        for group in groups:
            for rollout in group.rollouts:
                pool.start(rollout)
        for group in groups:
            out = pool.join(group)
            for rollout, scored, reward in zip(group.rollouts, out.scored, out.rewards, strict=True):
                number = int(rollout.tokens[0])
                unscored += [] if scored else [number]
                wrong += [number] if reward != (number / 8 if scored else 0) else []
        figures = pool.metrics()
        stopped.set()
        killer.join()
    asked = Counter(map(int, calls.read_text().split()))
    doomed = set(range(39, GROUPS * SIZE, 40))
    record.figure("reward_workers.rollouts", GROUPS * SIZE)
    record.figure("reward_workers.killed", len(struck), at_least=KILLS // 3)
    record.figure("reward_workers.seconds", round(time.monotonic() - begun, 1), at_most=LIMIT_S)
    record.figure("reward_workers.wrong_scores", wrong, equals=[])
    record.figure("reward_workers.doomed_but_scored", sorted(doomed - set(unscored)), equals=[])
    # A rollout is unscored only after two calls: of the doomed both end so, of any other both were struck at random.
    record.figure("reward_workers.unscored_by_two_kills", len(set(unscored) - doomed), at_most=len(struck) // 2)
    record.figure("reward_workers.most_calls", max(asked.values()), at_most=2)
    record.figure("reward_workers.counted_unscored", figures["reward/unscored"], equals=len(unscored))
    record.figure("reward_workers.counted_retries", figures["reward/retries"], at_least=len(unscored))
    record.figure("reward_workers.left_behind", _children(os.getpid()), equals=[])


def _run(record, folder: Path) -> None:
    """A run whose reward workers are killed ends with the rollouts and the policy of a run whose are not."""
    file, struck, stopped = folder / "slow.py", [], threading.Event()
    file.write_text(SLOW)
    seen = {}
    for name in ("whole", "killed"):
        place = folder / name
        command = [sys.executable, *RUN, f"--config.reward.functions=('{file}:score',)", f"--run-dir={place}"]
        environment = os.environ | {"PYTHONPATH": str(record.root), "JAX_PLATFORMS": "cpu"}
        with open(folder / f"{name}.log", "w") as log:
            run = subprocess.Popen(command, cwd=record.root, env=environment, stdout=log, stderr=subprocess.STDOUT)
            killer = threading.Thread(target=_kills, args=(run.pid, RUN_KILLS, 1, 0.5, stopped, struck), daemon=True)
            if name == "killed":
                killer.start()
            seen[name] = run.wait(timeout=900)
    stopped.set()
    killer.join()
    lines = [json.loads(line) for line in (folder / "killed" / "rewards.jsonl").read_text().splitlines()]
    record.figure("reward_workers.run.exit_codes", seen, equals={"whole": 0, "killed": 0})
    record.figure("reward_workers.run.killed", len(struck), at_least=5)
    record.figure("reward_workers.run.retries", sum(line["counts"].get("retries", 0) for line in lines), at_least=1)
    unscored = sum(not line["scored"] for line in lines)
    record.figure("reward_workers.run.unscored", unscored, equals=0)
    compared, differ = killed.compared(folder / "whole", folder / "killed")
    record.figure("reward_workers.run.files_compared", compared, at_least=3)
    record.figure("reward_workers.run.what_differs", differ, equals=[])
