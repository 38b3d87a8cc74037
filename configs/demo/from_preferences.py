"""The demo, rewarded by the reward model of configs/demo/reward_model.py alone. The exact result is only measured.

Hardware: 2 CPU cores.
Command: python -m jaxrl_post.main --config=configs/demo/from_preferences.py, after the command of configs/demo/reward_model.py
Expected: critic/score/mean rises, and held-out accuracy rises, because the model prefers careful solutions. Not measured yet.
"""

from pathlib import Path

from jaxrl_post.config import load

CONFIGS = Path(__file__).resolve().parents[1]


def get_config():
    c = load(str(CONFIGS / "demo.py"))
    c.name = "demo_from_preferences"
    c.reward.model, c.reward.model_weight = "runs/demo_reward_model/reward_model", 0.5
    c.reward.weights = (0.0,)  # of the exact result, which evaluation still reads as the accuracy
    return c
