"""GRPO as DeepSeekMath wrote it, on the demo's task and policy.

Recipe (arXiv 2402.03300, equations 3 and 4): advantages (R - mean) / std of the group. The loss is a mean over the
tokens of each rollout and then over rollouts. It includes 0.04 times the k3 estimate of KL(policy || reference). A
round has one update. The demo itself (configs/demo.py) is the form usual today: token-mean and no KL.
Hardware: 2 CPU cores. Command: python -m jaxrl_post.main --config=configs/grpo.py
Expected: scripts/results/ has no figures of this recipe yet. Those of the demo are in scripts/results/demo.json.
"""

from pathlib import Path

from jaxrl_post.config import load

HERE = Path(__file__).resolve().parent


def get_config():
    c = load(str(HERE / "demo.py"))
    c.name = "grpo"
    c.algorithm.adv_estimator, c.algorithm.loss_mode = "grpo", "vanilla"
    c.algorithm.loss_agg_mode = "seq-mean-token-mean"
    c.algorithm.kl_loss_coef, c.algorithm.kl_loss_type = 0.04, "k3"
    return c
