"""KL-Cov on the demo's task and policy: the tokens that would cost most entropy are held at the old policy.

Recipe (arXiv 2505.22617; verl's kl_cov): the 0.002 of the round's tokens with the largest covariance of
advantage and log-prob have the absolute log-ratio in their loss. Nothing is clipped.
Hardware: 2 CPU cores. Command: python -m jaxrl_post.main --config=configs/recipes/kl_cov.py
Expected: not measured yet. The demo's own figures are in scripts/results/demo.json.
"""

from pathlib import Path

from jaxrl_post.config import load

CONFIGS = Path(__file__).resolve().parents[1]


def get_config():
    c = load(str(CONFIGS / "demo.py"))
    c.name = "kl_cov"
    c.algorithm.loss_mode, c.algorithm.kl_cov_ratio, c.algorithm.ppo_kl_coef = "kl_cov", 2e-3, 1.0
    c.scheduler.mini_batches, c.scheduler.ppo_epochs = 4, 1
    c.eval.every = 20
    return c
