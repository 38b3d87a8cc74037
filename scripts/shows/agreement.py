"""Engine and learner give the same log-probs on the same weights, and at learning rate 0 the logged gap stays flat.

In one process the learner scores rollouts of the engine, on the stories260K weights (JAXRL_DATA) and on the demo's
policy. Then the demo config runs for 10 steps at learning rate 0. The gap that every run logs must neither grow nor
move.
"""

from __future__ import annotations

import tempfile
from pathlib import Path

import log_ratios
import numpy as np
import trained

from jaxrl_post.models import hf, llama2c

MINUTES = 3.0
PLATFORM = "cpu"
STEPS = 10


def show(record) -> None:
    story = llama2c.load(record.data("tinystories-260k", "stories260K.bin"))
    for name, (model, params) in (("stories260K", story), ("demo", hf.load(record.root / "configs" / "demo_policy"))):
        gaps = _gaps(model, params)
        record.figure(f"{name}_num_tokens", gaps.size, at_least=1000)
        record.figure(f"{name}_max_logprob_difference", float(gaps.max()), at_most=1e-4)
    _flat(record)


def _gaps(model, params):
    """Returns |engine - learner| of every sampled token's log-prob, at temperature 1 and 0.7."""
    found = [pair for heat in (1.0, 0.7) for pair in log_ratios.pairs(model, params, temperature=heat)]
    return np.concatenate([np.abs(mine - theirs) for mine, theirs in found])


def _flat(record) -> None:
    """Compares the first half of the steps with the last half.

    At equal weights they differ by which tokens were drawn, and by no more.
    """
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder) / "run"
        flat = f"steps={STEPS} optimizer.lr=0.0 eval.prompts=0 eval.every=0"
        trained.run(record, "configs/demo.py", place, flat, timeout_s=600)
        rows = trained.rows(place, "training/rollout_logprobs_abs_diff_mean")
    means = [row["training/rollout_logprobs_abs_diff_mean"] for row in rows]
    record.figure("lr0_num_steps", len(rows), equals=STEPS)
    record.figure(
        "lr0_max_logprob_difference", max(row["training/rollout_logprobs_abs_diff_max"] for row in rows), at_most=1e-4
    )
    record.figure("lr0_mean_gap_by_step", means)
    half = STEPS // 2
    record.figure("lr0_mean_gap_last_half_over_first", sum(means[half:]) / sum(means[:half]), at_least=0.9, at_most=1.1)
