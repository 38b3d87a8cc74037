"""Clip-Cov on the demo's task and policy: a few tokens that would cost most entropy have no gradient.

Recipe (arXiv 2505.22617; verl's clip_cov): of all tokens whose covariance of advantage and log-prob is above 1
and below 5, a share of 0.0002 of the round's tokens is drawn. They lose their gradient. The demo's covariances are smaller and its
rounds shorter, so its bounds are lower and its share is larger.
Hardware: 2 CPU cores. Command: python -m jaxrl_post.main --config=configs/recipes/clip_cov.py
Expected: not measured yet. The demo's own figures are in scripts/results/demo.json.
"""

from pathlib import Path

from jaxrl_post.config import load

CONFIGS = Path(__file__).resolve().parents[1]


def get_config():
    c = load(str(CONFIGS / "demo.py"))
    c.name = "clip_cov"
    c.algorithm.loss_mode = "clip_cov"
    c.algorithm.clip_cov_ratio, c.algorithm.clip_cov_lb, c.algorithm.clip_cov_ub = 2e-3, 0.5, 4.0
    c.scheduler.mini_batches, c.scheduler.ppo_epochs = 4, 1
    c.eval.every = 20
    return c
