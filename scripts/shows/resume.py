"""kill -9 at ten random moments, resumed each time: the run ends as the undisturbed one, bit for bit.

Runs the demo config with 32 prompts a step for 12 steps, saved every 3. Ten runs are each killed once, at a moment
drawn from a fixed seed: three while they start, seven between start and end. Then one run is killed again and again. At
last a bit of the newest checkpoint is flipped: the one before is used, and the run still ends alike.
"""

from __future__ import annotations

import random
import tempfile
from pathlib import Path

from killed import Runs, end, steps

MINUTES = 6.0

SEEDS = tuple(range(10))
STARTING = 3  # runs killed while they start; each of the others is killed in its own part of the run
STEPS, EVERY = 12, 3
COMMAND = [
    "--config=configs/demo.py",
    f"--config.steps={STEPS}",
    f"--config.checkpoint.every={EVERY}",
    "--config.scheduler.prompts=32",
    "--config.eval.prompts=16",
    "--config.eval.every=4",
]


def show(record) -> None:
    with tempfile.TemporaryDirectory() as folder:
        runs = Runs(record, Path(folder), COMMAND, STEPS)
        whole, seconds = runs.killed_at(SEEDS, STARTING)
        _again_and_again(record, runs, whole, seconds)
        _flipped(record, runs, whole)


def _again_and_again(record, runs: Runs, whole: Path, seconds: float) -> None:
    """Kills one run up to once for every seed. The moment lies in a part of the run that grows with each start."""
    kills, seen, run = 0, [], runs.here / "again"
    for seed in SEEDS:
        kills += runs.kill(run.name, random.Random(100 + seed).random() * (0.4 + 0.06 * seed) * seconds, 0.0)
        seen.append(max(steps(run), default=0))
    runs.finish(run.name)
    record.figure("killed_again_and_again.kills", kills, at_least=5)
    record.figure("killed_again_and_again.newest_steps", seen)
    record.figure("killed_again_and_again.resumed_from_a_save", sum(map(bool, seen)), at_least=1)
    record.figure("killed_again_and_again.what_differs", runs.differences(whole, run), equals=[])


def _flipped(record, runs: Runs, whole: Path) -> None:
    """Flips one bit of a whole run's newest checkpoint and runs its end once more."""
    run = runs.here / "flipped"
    runs.finish(run.name)
    newest = run / "checkpoints" / f"step_{STEPS:06d}"
    largest = max((file for file in newest.rglob("*") if file.is_file()), key=lambda file: file.stat().st_size)
    data = bytearray(largest.read_bytes())
    data[random.Random(0).randrange(len(data))] ^= 1
    largest.write_bytes(data)
    said = end(runs.begin(run.name))
    record.figure("flipped_byte.said", f"CHECKPOINT DAMAGED: step {STEPS} is not used" in said, equals=True)
    record.figure("flipped_byte.one_before_is_used", f"goes on after step {STEPS - EVERY}\n" in said, equals=True)
    record.figure("flipped_byte.moved_aside", newest.with_name(f"{newest.name}.damaged-1").is_dir(), equals=True)
    record.figure("flipped_byte.what_differs", runs.differences(whole, run), equals=[])
