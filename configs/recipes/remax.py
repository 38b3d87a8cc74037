"""ReMax on the demo's task and policy: the baseline of a prompt is the reward of its greedy rollout.

Recipe (arXiv 2310.10505, algorithm 2): each prompt has one greedy rollout, the last of its group, and samples. The
greedy one is only scored, never trained on. The paper has one sample per prompt. Here are seven, so that a group has as
many rollouts as the demo's.
Hardware: 2 CPU cores. Command: python -m jaxrl_post.main --config=configs/recipes/remax.py
Expected: not measured yet. The demo's own figures are in scripts/results/demo.json.
"""

from pathlib import Path

from jaxrl_post.config import load

CONFIGS = Path(__file__).resolve().parents[1]


def get_config():
    c = load(str(CONFIGS / "demo.py"))
    c.name = "remax"
    c.algorithm.adv_estimator = "remax"
    return c
