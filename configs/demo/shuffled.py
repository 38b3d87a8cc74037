"""The demo's control: rewards are shuffled within each group. There is nothing to learn, so nothing must be learned.

Recipe: that of configs/demo.py, 1,024 held-out prompts. Hardware: 2 CPU cores.
Command: python -m jaxrl_post.main --config=configs/demo/shuffled.py
Expected: the accuracy after equals the accuracy before, within 0.03. scripts/show.py demo checks this.
"""

from pathlib import Path

from jaxrl_post.config import load

CONFIGS = Path(__file__).resolve().parents[1]


def get_config():
    c = load(str(CONFIGS / "demo.py"))
    c.name = "demo_shuffled"
    c.reward.shuffle = True
    c.eval.prompts, c.eval.every = 1024, 0
    return c
