"""GRPO on the demo's task and policy, from the fifth of tokens alone that have the highest entropy.

Recipe (arXiv 2506.01939): where the policy is sure of a token, there is nothing to learn from it.
Hardware: 2 CPU cores. Command: python -m jaxrl_post.main --config=configs/recipes/high_entropy.py
Expected: not measured yet. The demo's own figures are in scripts/results/demo.json.
"""

from pathlib import Path

from jaxrl_post.config import load

CONFIGS = Path(__file__).resolve().parents[1]


def get_config():
    c = load(str(CONFIGS / "demo.py"))
    c.name = "high_entropy"
    c.algorithm.top_entropy_quantile = 0.2
    return c
