"""A mixture of experts visibly learns: configs/demo/moe.py at three seeds, each from a cold compilation cache; two controls do not.

- arms: seed 0 without repeated routes, and pipelined (configs/demo/pipeline.py) with them and without.
- controls: learning rate 0 and shuffled rewards, each on 1,024 held-out prompts.
- seeds: synchronous, with routes that the learner repeats. Each takes at most three minutes, which needs two free cores.
- drafts: the same recipe on 320 prompts, with drafts (configs/demo/speculation.py) and without. All steps have to train on
  the same tokens, log-probs and routes. Rows are free in the cost table, as where memory is the bound. The ratio of engine
  steps is what such a device would gain.
"""

from __future__ import annotations

import learning

MINUTES = 20.0
PLATFORM = "cpu"

SEEDS, AFTER = (0, 1, 2), 0.6
MOE, SFT = "configs/demo/moe.py", "configs/demo/moe_sft.py"
LIMIT_S = 1200.0  # of one run
METRICS = ("training/router_mismatch", "training/router_drift", "off_policy/max")
ROUTING = ("algorithm.router_replay", "algorithm.router_aux_loss_coef", "algorithm.router_z_loss_coef")
WITHOUT = "--config.algorithm.router_replay=False"


def show(record) -> None:
    same = learning.recipe(record, MOE, *ROUTING)
    arms = {
        "pipelined": ("configs/demo/pipeline.py", *same),
        "pipelined_without_replay": ("configs/demo/pipeline.py", *same, WITHOUT),
        "sync_without_replay": (MOE, WITHOUT),
    }
    for name, (file, *flags) in arms.items():
        found = record.cached(name, lambda: _learnt(record, file, *flags))
        learning.learns(record, name, found, after=AFTER)
        for metric, value in found["largest"].items():
            replayed = metric == "training/router_mismatch" and WITHOUT not in flags
            record.figure(f"{name}.{metric.replace('/', '.')}", value, **(dict(equals=0) if replayed else {}))
    learning.controls_learn_nothing(record, lambda *flags: _learnt(record, MOE, *flags), "--config.eval.every=0")
    for seed in SEEDS:
        found = record.cached(f"seed-{seed}", lambda: _learnt(record, MOE, f"--config.seed={seed}"))
        learning.learns(record, f"seed_{seed}", found, after=AFTER)
        record.figure(f"seed_{seed}.router_mismatch", found["largest"]["training/router_mismatch"], equals=0)
        record.figure(f"seed_{seed}.cpu_seconds", found["cpu_seconds"])
        record.figure(f"seed_{seed}.seconds", found["seconds"], at_most=180.0)
    found = record.cached("drafts", lambda: learning.drafts(record, *same, timeout_s=LIMIT_S))
    learning.drafts_save_steps(record, found, times=1.5)
    record.figure("drafts.recorded_words", found["recorded_words"], at_least=50_000)


def _learnt(record, file: str, *flags: str) -> dict:
    return learning.run(record, file, SFT, *flags, timeout_s=LIMIT_S, largest=METRICS)
