"""GMPO on the demo's task and policy: the geometric mean of a rollout's ratios, each bounded by its logarithm.

Recipe (arXiv 2507.20673): log-ratios of gains are at most 0.4, those of losses at least -0.4. The loss is a mean over
rollouts. A round's 64 prompts are trained on in four mini-batches, so that there is something to bound.
Hardware: 2 CPU cores. Command: python -m jaxrl_post.main --config=configs/recipes/gmpo.py
Expected: not measured yet. The demo's own figures are in scripts/results/demo.json.
"""

from pathlib import Path

from jaxrl_post.config import load

CONFIGS = Path(__file__).resolve().parents[1]


def get_config():
    c = load(str(CONFIGS / "demo.py"))
    c.name = "gmpo"
    c.algorithm.loss_mode, c.algorithm.loss_agg_mode = "geo_mean", "seq-mean-token-mean"
    c.algorithm.clip_ratio_low, c.algorithm.clip_ratio_high = 0.4, 0.4
    c.scheduler.mini_batches, c.scheduler.ppo_epochs = 4, 1
    c.eval.every = 20
    return c
