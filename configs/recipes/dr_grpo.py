"""Dr. GRPO on the demo's task and policy.

Recipe (arXiv 2503.20783, section 3.1): advantages are not divided by the group's standard deviation. The loss is a sum
over tokens divided by a constant. There is no KL term. The constant is sampling.max_tokens, 96, while rollouts have 9
to 17 tokens. So the gradient is smaller than in the other presets, and so is the optimizer's epsilon.
Hardware: 2 CPU cores. Command: python -m jaxrl_post.main --config=configs/recipes/dr_grpo.py
Expected: not measured yet. The demo's own figures are in scripts/results/demo.json.
"""

from pathlib import Path

from jaxrl_post.config import load

CONFIGS = Path(__file__).resolve().parents[1]


def get_config():
    c = load(str(CONFIGS / "demo.py"))
    c.name = "dr_grpo"
    c.algorithm.adv_estimator, c.algorithm.loss_agg_mode = "dr_grpo", "seq-mean-token-sum-norm"
    c.optimizer.eps = 5e-3
    return c
