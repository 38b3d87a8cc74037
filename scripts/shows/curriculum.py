"""Mixing holds its weights, a resumed run goes on exactly, and sampling by difficulty saves rollouts where prompts differ.

1. configs/demo_mixed.py: the shares of the prompts that the run draws, against the standard error of independent draws.
2. configs/demo_curriculum.py over two sources, once whole and once resumed in the middle: the same decisions and rollouts.
3. configs/demo.py on 640 prompts at eight seeds, with and without sampling by p(1-p). Evaluations say after how many
   rollouts the mean reward on held-out sums reaches REWARD. The interval is a bootstrap over seeds, both arms of a seed
   together. These sums are equally hard, so sampling by difficulty must only do no harm.
4. The same where half of the prompts are digits to be sorted, which the policy was not trained on. There it must help.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import math
import os
import sys
import tempfile
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import intervals

MINUTES = 75.0
LIMIT_S = 1800.0
SEEDS = tuple(range(8))
REWARD = 0.85  # on held-out sums at temperature 1; the demo ends with 0.93
REWARD_IN = "val-core/sums/acc/mean@4"
STEPS = 120  # a run ends where an evaluation has reached REWARD, and else here
EVERY, PER_STEP = 5, 64 * 8
DRAWN = 6400
SUMS = ("data.size=640",)
HALF = ("data.sources=['task:sums','task:sorting']", "data.size=320", "eval.data=task:sums")
CURRICULUM = ("curriculum.interest=variance", "curriculum.share=0.5", "curriculum.uniform=0.1", "curriculum.groups=1")

os.environ.setdefault("JAX_PLATFORMS", "cpu")


def show(record) -> None:
    sys.path[:0] = [str(record.root)]
    _weights(record)
    _resume(record)
    for data, flags, bounds in (("sums", SUMS, (1.05, None)), ("half", HALF, (0.9, 1.0))):
        found = _difficulty(record, data, flags)
        for name, value, bound in zip(("", ".low", ".high"), found, (bounds[0], None, bounds[1]), strict=True):
            record.figure(f"{data}.rollouts_of_curriculum_to_plain{name}", value, at_most=bound)


def _weights(record) -> None:
    """Counts the prompts of each source among those that a run of the demo's length draws."""
    from jaxrl_post import config
    from jaxrl_post.launch import inputs

    c = config.resolve(config.load(str(record.root / "configs" / "demo_mixed.py")))
    order = inputs.gather(c).train
    counts = Counter(order.at(position)[1].source for position in range(DRAWN))
    keys = {(epoch, prompt.id) for epoch, prompt in map(order.at, range(DRAWN))}
    record.figure("mixed.prompts", DRAWN)
    record.figure("mixed.epoch_and_prompt_twice", DRAWN - len(keys), equals=0)
    for source, weight in zip(("sums", "sorting"), c.data.weights, strict=True):
        share = weight / sum(c.data.weights)
        error = math.sqrt(share * (1 - share) / DRAWN)
        record.figure(f"mixed.{source}.share", counts[source] / DRAWN)
        record.figure(
            f"mixed.{source}.deviation_in_standard_errors", abs(counts[source] / DRAWN - share) / error, at_most=1.0
        )


def _resume(record) -> None:
    """Compares every decision and rollout of a run in one piece with those of a run in two."""
    short = (
        "--config.data.sources=['task:sums','task:sorting']",
        "--config.data.weights=[3.0,1.0]",
        "--config.data.size=24",
        "--config.eval.prompts=0",
        "--config.eval.every=0",
        "--config.scheduler.prompts=8",
        "--config.scheduler.group_size=4",
        "--config.checkpoint.every=4",
    )
    with tempfile.TemporaryDirectory() as folder:
        whole, halves = Path(folder) / "whole", Path(folder) / "halves"
        _run(record, "demo_curriculum", whole, *short, "--config.steps=12")
        _run(record, "demo_curriculum", halves, *short, "--config.steps=6")
        _run(record, "demo_curriculum", halves, *short, "--config.steps=12", "--resume")
        decisions, rollouts = (
            [_digest(place, name) for place in (whole, halves)] for name in ("scheduler_log*", "rollouts/*")
        )
        record.figure("resume.decisions_equal", decisions[0] == decisions[1] and bool(decisions[0]), equals=True)
        record.figure("resume.rollouts_equal", rollouts[0] == rollouts[1] and bool(rollouts[0]), equals=True)
        passes = sum(row.get("curriculum/num_passes", 0.0) for row in _rows(whole))
        record.figure("resume.passes", passes, at_least=3)


def _digest(place: Path, names: str) -> dict[str, str]:
    return {file.name: hashlib.blake2b(file.read_bytes()).hexdigest() for file in sorted(place.glob(names))}


def _difficulty(record, data: str, options: tuple[str, ...]) -> tuple[float, float, float]:
    """Returns the rollouts that sampling by difficulty needs over those of plain sampling, and the interval.

    The two arms of a seed run at once: a small model keeps little more than one core busy."""
    arms = {"plain": options, "curriculum": (*options, *CURRICULUM)}
    needed: dict[str, list[float]] = {arm: [] for arm in arms}
    for seed in SEEDS:

        def found(arm: str, seed: int = seed) -> float:
            return record.cached(f"{data}-{arm}-{seed}", lambda: _rollouts(record, seed, arms[arm]))

        with ThreadPoolExecutor(len(arms)) as pool:
            for arm, rollouts in zip(arms, pool.map(found, arms), strict=True):
                record.figure(f"{data}.{arm}.seed_{seed}.rollouts_to_reward", rollouts)
                needed[arm].append(rollouts)
    return intervals.ratio_of_paired_medians(needed["curriculum"], needed["plain"])


def _rollouts(record, seed: int, options: tuple[str, ...]) -> float:
    """Returns the rollouts until REWARD, between two evaluations by a straight line; all of the run if it is not reached."""
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder) / "run"
        shared = (f"steps={STEPS}", "checkpoint.every=0", "eval.prompts=128", f"eval.every={EVERY}", f"seed={seed}")
        command = ("scripts/until_reward.py", place, REWARD_IN, REWARD, "configs/demo.py", *shared, *options)
        record.run(*command, timeout_s=LIMIT_S)
        curve = [(row["step"], row[REWARD_IN]) for row in _rows(place) if REWARD_IN in row]
        for (before, low), (step, high) in itertools.pairwise(curve):
            if low < REWARD <= high:
                return PER_STEP * (before + (step - before) * (REWARD - low) / (high - low))
    return float(PER_STEP * STEPS)


def _rows(place: Path) -> list[dict]:
    return [json.loads(line) for line in (place / "metrics.jsonl").read_text().splitlines()]


def _run(record, config: str, place: Path, *flags: str) -> None:
    """Runs a whole command."""
    file = f"--config=configs/{config}.py"
    record.run("-m", "jaxrl_post.main", file, f"--run-dir={place}", *flags, timeout_s=LIMIT_S)
