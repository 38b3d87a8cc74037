"""VAPO on the demo's task and policy: PPO with a critic, for long chains of thought.

Recipe (arXiv 2504.05118):
- The critic learns returns of lambda 1. Advantages have the lambda 1 - 1 / (0.05 T) of a rollout of T tokens.
- Rollouts with a positive reward are imitated too, with a weight of 0.1.
- The upper bound of the ratio is 0.28. The critic learns alone over the first steps.

Hardware: 2 CPU cores. Command: python -m jaxrl_post.main --config=configs/recipes/vapo.py
Expected: not measured yet. The demo's own figures are in scripts/results/demo.json.
"""

from pathlib import Path

from jaxrl_post.config import load

CONFIGS = Path(__file__).resolve().parents[1]


def get_config():
    c = load(str(CONFIGS / "demo/ppo.py"))
    c.name = "vapo"
    c.algorithm.lam, c.algorithm.lam_value, c.algorithm.lam_alpha = 1.0, 1.0, 0.05
    c.algorithm.positive_nll_coef, c.algorithm.clip_ratio_high = 0.1, 0.28
    return c
