"""Runs a command as several processes of one job on this machine, and compares what they wrote."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path


def run(root: Path, command: Sequence[str], *, processes: int, devices: int, timeout_s: float = 900) -> None:
    """Runs a `command` of Python in `processes` processes with so many forced devices each.

    Raises:
      RuntimeError: a process failed; the message ends with its output.
    """
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    running = []
    for index in range(processes):
        env = {**os.environ, "JAX_PLATFORMS": "cpu", "XLA_FLAGS": f"--xla_force_host_platform_device_count={devices}"}
        if processes > 1:
            env |= {
                "JAX_COORDINATOR_ADDRESS": f"127.0.0.1:{port}",
                "JAX_NUM_PROCESSES": str(processes),
                "JAX_PROCESS_ID": str(index),
            }
        running.append(
            subprocess.Popen(
                [sys.executable, *command],
                cwd=root,
                env=env,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
            )
        )
    try:
        told = [process.communicate(timeout=timeout_s)[0] for process in running]
    finally:
        for process in running:
            process.kill()
    for process, text in zip(running, told):
        if process.returncode:
            raise RuntimeError(f"a process of the run exited {process.returncode}:\n{text[-4000:]}")


def compare(record, one: Path, two: Path, steps: int, prefix: str = "") -> None:
    """Writes figures of two processes' folders: decisions, rollouts, evaluations and deterministic metrics, byte for
    byte. `prefix`: of the figures' names.
    """
    same = (one / "scheduler_log.jsonl").read_bytes() == (two / "scheduler_log.jsonl").read_bytes()
    record.figure(f"{prefix}processes_scheduler_log_equal", same, equals=True)
    for name in ("rollouts", "evaluations"):
        record.figure(f"{prefix}processes_{name}_equal", same_files(one / name, two / name), equals=True)
    rows = [_deterministic(process / "metrics.jsonl") for process in (one, two)]
    record.figure(f"{prefix}processes_deterministic_metrics_equal", rows[0] == rows[1], equals=True)
    record.figure(f"{prefix}num_metric_rows", len(rows[0]), at_least=steps)
    record.figure(f"{prefix}num_decisions", len((one / "scheduler_log.jsonl").read_text().splitlines()))


def same_files(one: Path, two: Path) -> bool:
    """Returns whether two folders hold the same files, byte for byte."""
    held = [{file.name: file.read_bytes() for file in folder.iterdir()} for folder in (one, two)]
    return held[0] == held[1]


def _deterministic(file: Path) -> list[str]:
    from jaxrl_post.runs import metric_rows

    return [
        json.dumps(metric_rows.deterministic(json.loads(line)), sort_keys=True)
        for line in file.read_text().splitlines()
    ]


def equal_tokens(one: Path, two: Path, step: int) -> float:
    """Returns the share of the rollouts that step `step` logged whose tokens are equal in two runs' folders."""
    import numpy as np

    from jaxrl_post.runs import rollout_log

    pairs = [rollout_log.read(sorted((run / "rollouts").glob("*.npz"))[step - 1]) for run in (one, two)]
    rollouts = [[r for group in groups for r in group.rollouts] for groups in pairs]
    return float(np.mean([np.array_equal(a.tokens, b.tokens) for a, b in zip(*rollouts, strict=True)]))


def first_round(file: Path) -> list[str]:
    """Returns every decision of a scheduler_log.jsonl up to the first batch that was taken."""
    lines = file.read_text().splitlines()
    taken = next(i for i, line in enumerate(lines) if json.loads(line)["event"] == "take")
    return lines[: taken + 1]
