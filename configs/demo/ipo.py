"""IPO on the pairs of configs/demo/dpo.py: a squared loss that draws the margin per token to 1 / (2 beta).

Hardware: 2 CPU cores.
Command: python -m jaxrl_post.main --config=configs/demo/ipo.py --run-dir=runs/demo_ipo
Expected, on 256 held-out problems (one seed, 23 CPU seconds):
- val/loss: from 6.25, which is 1 / (2 beta) squared, to 0.42; val/rewards/accuracies: from 0 to 1.00
- mean reward of 4 rollouts at temperature 1: from 0.37 to 0.64; greedy: from 0.01 to 0.93
"""

from pathlib import Path

from jaxrl_post.config import load

CONFIGS = Path(__file__).resolve().parents[1]


def get_config():
    c = load(str(CONFIGS / "demo/dpo.py"))
    c.name = "demo_ipo"
    c.algorithm.loss_mode, c.algorithm.label_smoothing = "ipo", 0.0
    return c
