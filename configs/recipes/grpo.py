"""GRPO as DeepSeekMath describes it, on the demo's task and policy.

Recipe (arXiv 2402.03300, equations 3 and 4): advantages are (R - mean) / std of the group. The loss is a mean over
tokens within each rollout and then over rollouts. It includes 0.04 times the k3 estimate of KL(policy || reference). A
round has one update. The demo (configs/demo.py) uses today's usual form: token-mean and no KL.
Hardware: 2 CPU cores. Command: python -m jaxrl_post.main --config=configs/recipes/grpo.py
Expected: not measured yet. The demo's own figures are in scripts/results/demo.json.
"""

from pathlib import Path

from jaxrl_post.config import load

CONFIGS = Path(__file__).resolve().parents[1]


def get_config():
    c = load(str(CONFIGS / "demo.py"))
    c.name = "grpo"
    c.algorithm.adv_estimator, c.algorithm.loss_mode = "grpo", "vanilla"
    c.algorithm.loss_agg_mode = "seq-mean-token-mean"
    c.algorithm.kl_loss_coef, c.algorithm.kl_loss_type = 0.04, "k3"
    return c
