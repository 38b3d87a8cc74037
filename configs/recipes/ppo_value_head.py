"""PPO with a value head on the policy's own trunk, on the demo's task and policy.

Recipe (arXiv 1707.06347, equation 9): policy and values share all layers, and the value loss is added to the policy's
with a coefficient. It saves the memory of a second decoder. Advantages are those of whole turns, of which a rollout of
the demo has one.
Hardware: 2 CPU cores. Command: python -m jaxrl_post.main --config=configs/recipes/ppo_value_head.py
Expected: not measured yet. The demo's own figures are in scripts/results/demo.json.
"""

from pathlib import Path

from jaxrl_post.config import load

CONFIGS = Path(__file__).resolve().parents[1]


def get_config():
    c = load(str(CONFIGS / "demo/ppo.py"))
    c.name = "ppo_value_head"
    c.algorithm.adv_estimator = "gae_turn"
    c.critic.trunk, c.critic.loss_coef = "policy", 0.1
    return c
