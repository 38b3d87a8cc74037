"""kill -9 at ten random moments in the midst of pipelined generation, resumed each time: bit for bit the uninterrupted
run.

Runs the demo's task with 32 prompts a step for 16 steps, saved every 3 steps, with rollouts running at every publish.
They have tokens of several versions. A save makes them re-enter by `recompute`, in the uninterrupted run too. Ten runs
are each killed once, at a moment drawn from a fixed seed: three while they start, seven between start and end.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

from killed import Runs

MINUTES = 5.0

SEEDS = tuple(range(10))
STARTING = 3  # runs killed while they start; each of the others is killed in its own part of the run
STEPS, EVERY = 16, 3
COMMAND = [
    "--config=configs/demo_pipeline.py",
    f"--config.steps={STEPS}",
    f"--config.checkpoint.every={EVERY}",
    "--config.scheduler.prompts=16",
    "--config.scheduler.group_size=4",
    "--config.scheduler.max_unscored=32",
    "--config.engine.steps_per_dispatch=4",
    "--config.eval.prompts=16",
    "--config.eval.every=6",
]


def show(record) -> None:
    sys.path.insert(0, str(record.root))
    from jaxrl_post.telemetry import metrics

    with tempfile.TemporaryDirectory() as folder:
        runs = Runs(record, Path(folder), COMMAND, STEPS)
        whole, _ = runs.killed_at(SEEDS, STARTING)
        rows = [row for row in metrics.read(whole / "metrics.jsonl") if "off_policy/mean" in row]
        record.figure("steps_on_tokens_of_older_weights", sum(row["off_policy/max"] > 0 for row in rows), at_least=8)
        record.figure(
            "answers_carried_over",
            sum(row.get(f"swap/num_{how}", 0) for row in rows for how in ("kept", "verified", "recomputed")),
            at_least=50,
        )
        record.figure("largest_staleness", max(row["off_policy/max"] for row in rows), at_most=4)
