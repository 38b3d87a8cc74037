"""A model with recurrent states visibly learns: configs/demo/hybrid.py at three seeds, each from a cold cache; two controls do not.

- arms: seed 0 pipelined (configs/demo/pipeline.py).
- controls: learning rate 0 and shuffled rewards, each on 1,024 held-out prompts.
- seeds: synchronous. Each takes at most three minutes, which needs two free cores.
- drafts: the same recipe on 320 prompts, with drafts (configs/demo/speculation.py) and without. All steps have to train on the
  same tokens and log-probs. Rows are free in the cost table, as where memory is the bound.
"""

from __future__ import annotations

import learning

MINUTES = 20.0
PLATFORM = "cpu"

SEEDS, AFTER = (0, 1, 2), 0.6
HYBRID, SFT = "configs/demo/hybrid.py", "configs/demo/hybrid_sft.py"
LIMIT_S = 1200.0  # of one run


def show(record) -> None:
    same = learning.recipe(record, HYBRID)
    found = record.cached("pipelined", lambda: _learnt(record, "configs/demo/pipeline.py", *same))
    learning.learns(record, "pipelined", found, after=AFTER)
    learning.controls_learn_nothing(record, lambda *flags: _learnt(record, HYBRID, *flags), "--config.eval.every=0")
    for seed in SEEDS:
        found = record.cached(f"seed-{seed}", lambda: _learnt(record, HYBRID, f"--config.seed={seed}"))
        learning.learns(record, f"seed_{seed}", found, after=AFTER)
        record.figure(f"seed_{seed}.cpu_seconds", found["cpu_seconds"])
        record.figure(f"seed_{seed}.seconds", found["seconds"], at_most=180.0)
    found = record.cached("drafts", lambda: learning.drafts(record, *same, timeout_s=LIMIT_S))
    learning.drafts_save_steps(record, found, times=1.25)


def _learnt(record, file: str, *flags: str) -> dict:
    return learning.run(record, file, SFT, *flags, timeout_s=LIMIT_S, largest=("off_policy/max",))
