"""DAPO on the demo's task and policy.

Recipe (arXiv 2503.14476):
- The clip range is 0.2 below and 0.28 above (section 3.1).
- Groups whose rollouts are all right or all wrong are left out and replaced (3.2).
- The loss is a mean over tokens (3.3).
- Rollouts cut at the limit leave the loss and stay in the baseline (3.4).
- Over the last `overlong_buffer` tokens before the limit the reward sinks by up to 1 (3.4).
- A small entropy bonus, not from the paper, keeps rollouts different, so that there is something to sample from.

Hardware: 2 CPU cores. Command: python -m jaxrl_post.main --config=configs/recipes/dapo.py
Expected: not measured yet. The demo's own figures are in scripts/results/demo.json.
"""

from pathlib import Path

from jaxrl_post.config import load

CONFIGS = Path(__file__).resolve().parents[1]


def get_config():
    c = load(str(CONFIGS / "demo.py"))
    c.name, c.steps = "dapo", 40
    c.algorithm.clip_ratio_low, c.algorithm.clip_ratio_high = 0.2, 0.28
    c.algorithm.loss_agg_mode, c.algorithm.entropy_coef = "token-mean", 1e-3
    c.algorithm.overlong_buffer, c.algorithm.overlong_penalty, c.algorithm.overlong_filtering = 24, 1.0, True
    c.scheduler.filter_groups, c.scheduler.filter_metric, c.scheduler.max_waves = True, "acc", 10
    c.eval.every = 20
    return c
