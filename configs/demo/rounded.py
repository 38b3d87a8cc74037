"""The demo's task and policy, trained through the rounding of its rollouts.

Recipe: GRPO as in configs/demo.py. The engine has the matrices of layers in int8. The learner rounds them in each product as the engine
does, and the gradient passes the rounding. So both compute the same log-probs, to rounding of float32.
Hardware: that of the demo. Command: python -m jaxrl_post.main --config=configs/demo/rounded.py
Expected: not measured yet. show.py quantised compares the log-probs of both.
"""

from pathlib import Path

from jaxrl_post.config import load

CONFIGS = Path(__file__).resolve().parents[1]


def get_config():
    c = load(str(CONFIGS / "demo.py"))
    c.name = "rounded"
    c.engine.weights, c.model.weights = "int8", "int8"
    return c
