"""IPO on the pairs of configs/demo_dpo.py: a squared loss that draws the margin per token to 1 / (2 beta).

Hardware: 2 CPU cores.
Command: python -m jaxrl_post.main --config=configs/demo_ipo.py --run-dir=runs/demo_ipo
Expected: actor/preference_loss falls, and rewards/accuracies rises. Not measured yet.
"""

from pathlib import Path

from jaxrl_post.config import load

HERE = Path(__file__).resolve().parent


def get_config():
    c = load(str(HERE / "demo_dpo.py"))
    c.name = "demo_ipo"
    c.algorithm.loss_mode, c.algorithm.label_smoothing = "ipo", 0.0
    return c
