"""Tokens per second of the learner alone, on rollouts of random tokens: prepare, accumulate and commit.

    python scripts/bench.py train --json FILE [--turns=5] [--shapes=64x160,8x160,4x320]

Packs the tiny model's two cases of scripts/bench.py step into micro-batches of several shapes (rows x tokens). All take
their turns one after another. A figure is a median over the turns. Tokens are those of rollouts; prompts and padding
are computed too.
"""

from __future__ import annotations

import os
import statistics
import sys
import time
from pathlib import Path

os.environ.setdefault("JAX_PLATFORMS", "cpu")
SHAPES = "64x160,8x160,8x320"
WARMUP = 1


def bench(record) -> None:
    sys.path.insert(0, str(Path(__file__).resolve().parent))
    import step

    given = record.options
    shapes = {name: tuple(map(int, name.split("x"))) for name in given.get("shapes", SHAPES).split(",")}
    learners = {name: step.learner(*shape) for name, shape in shapes.items()}
    seconds: dict[str, list[dict[str, float]]] = {}
    for turn in range(WARMUP + int(given.get("turns", 5))):
        for case in step.SETTINGS:
            groups = random_groups(turn, step.lengths(case))
            for name, learner in learners.items():
                took = stages(learner, groups)
                if turn >= WARMUP:
                    seconds.setdefault(f"{case}_{name}", []).append(took)
    for name, turned in seconds.items():
        figures = {f"{stage}_s": statistics.median(took[stage] for took in turned) for stage in turned[0]}
        tokens = sum(step.lengths(name.partition("_")[0]))
        record.figure(name, {"trained_tokens_per_s": tokens / figures["all_s"], **figures})
    record.figure("load_average", os.getloadavg()[0])


def stages(learner, groups: list) -> dict[str, float]:
    """Returns the seconds of each stage, waited for, and of all."""
    import jax

    marks = [time.perf_counter()]
    for call, result in (
        (lambda: learner.prepare(groups), lambda: None),
        (lambda: learner.accumulate(groups), learner.gradient),
        (learner.commit, lambda: learner.params),
    ):
        call()
        jax.block_until_ready(result())
        marks.append(time.perf_counter())
    names = ("prepare", "accumulate", "commit")
    return {name: after - before for name, before, after in zip(names, marks, marks[1:])} | {
        "all": marks[-1] - marks[0]
    }


def random_groups(turn: int, limits: list[int]) -> list:
    import numpy as np
    import step

    from jaxrl_post.types import Finish, Rollout

    noise, asked = np.random.default_rng(turn), step.requests(turn, limits)
    rollouts = [
        Rollout(
            id=r.rollout_id,
            prompt=r.prompt,
            tokens=noise.integers(0, step.VOCAB, r.max_tokens),
            sampled=[True] * r.max_tokens,
            logprobs=-7 * noise.random(r.max_tokens),
            entropies=[6.0] * r.max_tokens,
            versions=[0] * r.max_tokens,
            drafted=[False] * r.max_tokens,
            finish=Finish.LENGTH,
            start_clock=0,
            finish_clock=1,
        )
        for r in asked
    ]
    return [step.scored(rollouts[at : at + step.GROUP]) for at in range(0, len(rollouts), step.GROUP)]
