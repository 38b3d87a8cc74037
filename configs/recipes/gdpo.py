"""GDPO on the demo's task and policy: two rewards, each normalised within its group before they are added.

Recipe (arXiv 2601.05242): exactness counts 1, and ending by itself counts 0.25. In a plain sum the reward that varies less
would hardly be heard. Here both have the same spread.
Hardware: 2 CPU cores. Command: python -m jaxrl_post.main --config=configs/recipes/gdpo.py
Expected: not measured yet. The demo's own figures are in scripts/results/demo.json.
"""

from pathlib import Path

from jaxrl_post.config import load

CONFIGS = Path(__file__).resolve().parents[1]


def get_config():
    c = load(str(CONFIGS / "demo.py"))
    c.name = "gdpo"
    c.reward.functions = ("jaxrl_post.rewards.math:exact", "jaxrl_post.rewards.length:finished")
    c.algorithm.adv_estimator = "gdpo"
    c.algorithm.gdpo_reward_keys, c.algorithm.gdpo_reward_weights = ("exact/score", "finished/score"), (1.0, 0.25)
    return c
