"""Dr. GRPO on the demo's task and policy.

Recipe: advantages without the division by the group's standard deviation. The loss is a sum over tokens divided by a
constant (arXiv 2503.20783, section 3.1), without a KL term. The constant is sampling.max_tokens, 96, and rollouts have
9 to 17 tokens. So the gradient is smaller than in the other presets, and the optimizer's epsilon is smaller too.
Hardware: 2 CPU cores. Command: python -m jaxrl_post.main --config=configs/dr_grpo.py
Expected: scripts/results/ has no figures of this recipe yet. Those of the demo are in scripts/results/demo.json.
"""

from pathlib import Path

from jaxrl_post.config import load

HERE = Path(__file__).resolve().parent


def get_config():
    c = load(str(HERE / "demo.py"))
    c.name = "dr_grpo"
    c.algorithm.adv_estimator, c.algorithm.loss_agg_mode = "dr_grpo", "seq-mean-token-sum-norm"
    c.optimizer.eps = 5e-3
    return c
