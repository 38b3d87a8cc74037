"""What a learning rate does to a small policy: the demo's task and policy (161,000 weights) at several rates, two seeds each.

    JAX_PLATFORMS=cpu nice -n 15 python scripts/bench.py learning-rates --json scripts/results/learning-rates.json

The arm `own` has the optimizer of configs/demo.py, whose epsilon makes Adam gradient descent with momentum. The others have
the defaults of the section optimizer, but for the rate. Figures are mean@4 on held-out prompts, by seed.
"""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path

STEPS, SEEDS = 30, (0, 1)
SMALL = ("scheduler.prompts=32", "eval.prompts=128", "eval.every=0", f"steps={STEPS}")
DEFAULTS = ("optimizer.eps=1e-8", "optimizer.max_grad_norm=1.0")
ARMS = {"1e-6": ("optimizer.lr=1e-6", *DEFAULTS), "1e-4": ("optimizer.lr=1e-4", *DEFAULTS), "own": ()}


def bench(record) -> None:
    sys.path.insert(0, str(record.root))
    import jaxrl_post

    record.figure("steps", STEPS)
    with tempfile.TemporaryDirectory() as folder:
        for arm, rate in ARMS.items():
            for seed in SEEDS:
                run = Path(folder) / f"{arm}-{seed}"
                config = str(record.root / "configs" / "demo.py")
                jaxrl_post.train(config, overrides=(*SMALL, *rate, f"seed={seed}"), folder=run)
                found = json.loads((run / "summary.json").read_text())["eval"]
                record.figure(f"{arm}.seed_{seed}.before", found["before"]["mean_at_4"])
                record.figure(f"{arm}.seed_{seed}.after", found["after"]["mean_at_4"])
