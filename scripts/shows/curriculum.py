"""Mixing holds its weights, a resumed run goes on exactly, and sampling by difficulty saves rollouts where prompts differ.

1. configs/demo/mixed.py: the shares of the prompts that the run draws, against the standard error of independent draws.
2. configs/demo/curriculum.py over two sources, once whole and once resumed in the middle: the same decisions and rollouts.
3. configs/demo.py on 640 prompts at eight seeds, with and without sampling by p(1-p). Evaluations say after how many
   rollouts the mean reward on held-out sums reaches REWARD. The interval is a bootstrap over seeds, both arms of a seed
   together. These sums are equally hard, so sampling by difficulty must only do no harm.
4. The same where half of the prompts are digits to be sorted, which the policy was not trained on. There it must help.
"""

from __future__ import annotations

import hashlib
import itertools
import math
import tempfile
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import intervals
import trained

from jaxrl_post.launch.parts import inputs

MINUTES = 75.0
PLATFORM = "cpu"
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


def show(record) -> None:
    _weights(record)
    _resume(record)
    for data, flags, bounds in (("sums", SUMS, (1.05, None)), ("half", HALF, (0.9, 1.0))):
        found = _difficulty(record, data, flags)
        for name, value, bound in zip(("", ".low", ".high"), found, (bounds[0], None, bounds[1]), strict=True):
            record.figure(f"{data}.rollouts_of_curriculum_to_plain{name}", value, at_most=bound)


def _weights(record) -> None:
    """Counts the prompts of each source among those that a run of the demo's length draws."""
    from jaxrl_post import config

    c = config.resolve(config.load(str(record.root / "configs" / "demo" / "mixed.py")))
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
    file, short = (
        "configs/demo/curriculum.py",
        (
            "data.sources=['task:sums','task:sorting'] data.weights=[3.0,1.0] data.size=24 eval.prompts=0 eval.every=0 "
            "scheduler.prompts=8 scheduler.group_size=4 checkpoint.every=4"
        ),
    )
    with tempfile.TemporaryDirectory() as folder:
        whole, halves = Path(folder) / "whole", Path(folder) / "halves"
        for place, more in ((whole, ["steps=12"]), (halves, ["steps=6"]), (halves, ["steps=12", "--resume"])):
            trained.run(record, file, place, short, *more, timeout_s=LIMIT_S)
        decisions, rollouts = (
            [_digest(place, name) for place in (whole, halves)] for name in ("scheduler_log*", "rollouts/*")
        )
        record.figure("resume.decisions_equal", decisions[0] == decisions[1] and bool(decisions[0]), equals=True)
        record.figure("resume.rollouts_equal", rollouts[0] == rollouts[1] and bool(rollouts[0]), equals=True)
        passes = sum(row.get("curriculum/num_passes", 0.0) for row in trained.rows(whole))
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
        curve = [(row["step"], row[REWARD_IN]) for row in trained.rows(place) if REWARD_IN in row]
        for (before, low), (step, high) in itertools.pairwise(curve):
            if low < REWARD <= high:
                return PER_STEP * (before + (step - before) * (REWARD - low) / (high - low))
    return float(PER_STEP * STEPS)
