"""RAE on two sources of prompts: the baseline of a rollout is the running mean of its source's rewards.

Recipe (SPIRAL, arXiv 2506.24119): made for self-play, where a source is one side of a game. Here the sources are sums and
digits to be sorted. A group is not compared with itself, so it could have one rollout.
Hardware: 2 CPU cores. Command: python -m jaxrl_post.main --config=configs/recipes/rae.py
Expected: not measured yet. The demo's own figures are in scripts/results/demo.json.
"""

from pathlib import Path

from jaxrl_post.config import load

CONFIGS = Path(__file__).resolve().parents[1]


def get_config():
    c = load(str(CONFIGS / "demo/mixed.py"))
    c.name = "rae"
    c.algorithm.adv_estimator, c.algorithm.rae_decay = "rae", 0.9
    return c
