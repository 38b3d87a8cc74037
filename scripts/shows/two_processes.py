"""Two processes decide, sample and measure the same, byte for byte, without telling each other.

The demo config for 3 steps on a mesh of data 2 x fsdp 2: as 2 processes of 2 forced devices, and as 1 process of 4. Between
the two processes scheduler log, rollouts and deterministic metrics are equal byte for byte. Against the single process the
decisions and tokens of step 1 are equal and its gradient agrees per leaf to the order of additions; what later steps do is
reported.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import tempfile
from pathlib import Path

MINUTES = 5.0
STEPS = 3
OVERRIDES = [f"--config.steps={STEPS}", "--config.mesh.data=2", "--config.mesh.fsdp=2", "--config.engine.slots=32",
             "--config.eval.prompts=16", "--config.eval.every=0"]


def show(record) -> None:
    sys.path.insert(0, str(record.root))
    with tempfile.TemporaryDirectory() as folder:
        pair, alone = Path(folder) / "pair", Path(folder) / "alone"
        _run(record.root, pair, processes=2)
        _run(record.root, alone, processes=1)
        _compare_processes(record, *(pair / f"process_{index}" for index in (0, 1)))
        _compare_runs(record, pair / "process_0", alone)
        worst = _worst_leaf(f"{pair}.npz", f"{alone}.npz")
        record.figure("step_1_gradient_worst_leaf_relative_difference", worst, at_most=5e-6)


def _run(root: Path, place: Path, *, processes: int) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    running = []
    for index in range(processes):
        env = {**os.environ, "JAX_PLATFORMS": "cpu",
               "XLA_FLAGS": f"--xla_force_host_platform_device_count={4 // processes}"}
        if processes > 1:
            env |= {"JAX_COORDINATOR_ADDRESS": f"127.0.0.1:{port}", "JAX_NUM_PROCESSES": str(processes),
                    "JAX_PROCESS_ID": str(index)}
        command = [sys.executable, "scripts/first_gradient.py", f"{place}.npz", "--config=configs/demo.py", *OVERRIDES,
                   f"--run-dir={place}"]
        running.append(subprocess.Popen(command, cwd=root, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
                                        text=True))
    try:
        told = [process.communicate(timeout=900)[0] for process in running]
    finally:
        for process in running:
            process.kill()
    for process, text in zip(running, told):
        if process.returncode:
            raise RuntimeError(f"a process of the run exited {process.returncode}:\n{text[-4000:]}")


def _compare_processes(record, one: Path, two: Path) -> None:
    same = (one / "scheduler_log.jsonl").read_bytes() == (two / "scheduler_log.jsonl").read_bytes()
    record.figure("processes_scheduler_log_equal", same, equals=True)
    for name in ("rollouts", "evaluations"):
        files = sorted(file.name for file in (one / name).iterdir())
        same = files == sorted(file.name for file in (two / name).iterdir()) and all(
            (one / name / file).read_bytes() == (two / name / file).read_bytes() for file in files)
        record.figure(f"processes_{name}_equal", same, equals=True)
    rows = [_deterministic(process / "metrics.jsonl") for process in (one, two)]
    record.figure("processes_deterministic_metrics_equal", rows[0] == rows[1], equals=True)
    record.figure("num_metric_rows", len(rows[0]), at_least=STEPS)
    record.figure("num_decisions", len((one / "scheduler_log.jsonl").read_text().splitlines()))


def _deterministic(file: Path) -> list[str]:
    from jaxrl_post import metrics
    return [json.dumps(metrics.deterministic(json.loads(line)), sort_keys=True) for line in file.read_text().splitlines()]


def _compare_runs(record, pair: Path, alone: Path) -> None:
    import numpy as np

    from jaxrl_post import rollout_log
    decisions = [_first_round(run / "scheduler_log.jsonl") for run in (pair, alone)]
    record.figure("step_1_decisions_equal", decisions[0] == decisions[1], equals=True)
    record.figure("step_1_num_decisions", len(decisions[0]), at_least=3)
    for step in range(1, STEPS + 1):
        pairs = [rollout_log.read(sorted((run / "rollouts").glob("*.npz"))[step - 1]) for run in (pair, alone)]
        rollouts = [[r for group in groups for r in group.rollouts] for groups in pairs]
        same = [np.array_equal(a.tokens, b.tokens) for a, b in zip(*rollouts, strict=True)]
        record.figure(f"step_{step}_share_of_rollouts_with_equal_tokens", float(np.mean(same)),
                      **({"equals": 1.0} if step == 1 else {}))


def _first_round(file: Path) -> list[str]:
    """Every decision up to the first batch that was taken."""
    lines = file.read_text().splitlines()
    taken = next(i for i, line in enumerate(lines) if json.loads(line)["event"] == "take")
    return lines[:taken + 1]


def _worst_leaf(one: str, two: str) -> float:
    """Largest over leaves of |a - b| / |b| in 2-norm."""
    import numpy as np
    a, b = np.load(one), np.load(two)
    assert sorted(a) == sorted(b)
    return max(float(np.linalg.norm(a[name] - b[name]) / np.linalg.norm(b[name])) for name in a)
