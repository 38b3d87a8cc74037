"""A policy visibly learns: configs/demo.py at three seeds, each from a cold compilation cache; two controls do not.

Neither the supervised training nor this one has seen the held-out prompts. The reward is the exact answer and nothing
else. The controls are one seed with 1,024 held-out prompts: learning rate 0, and the rewards of every group handed to
its rollouts in a random order.
"""

from __future__ import annotations

import learning

MINUTES = 9.0

SEEDS = (0, 1, 2)
FILES = ("configs/demo.py", "configs/demo/sft.py")
LIMIT_S = 900.0  # of one run; the bound on its seconds is a figure


def show(record) -> None:
    for seed in SEEDS:
        flag = f"--config.seed={seed}"
        found = record.cached(f"seed-{seed}", lambda: learning.run(record, *FILES, flag, timeout_s=LIMIT_S))
        learning.learns(record, f"seed_{seed}", found, after=0.85)
        for when in ("before", "after"):
            tail = found[when]["correct_length_tail"]
            record.figure(f"seed_{seed}.correct_length_p99_to_p50.{when}", tail, at_least=4.0)
        record.figure(f"seed_{seed}.seconds", found["seconds"], at_most=300.0)
    learning.controls_learn_nothing(record, lambda *flags: learning.run(record, *FILES, *flags, timeout_s=LIMIT_S))
