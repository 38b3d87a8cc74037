"""Dr. GRPO on the demo's task, with a small KL term against the supervised policy.

Recipe: advantages without the division by the group's standard deviation, the loss a sum over tokens divided by a
constant (arXiv 2503.20783, section 3.2), and the k3 estimate of KL(policy || reference) in the loss (arXiv 2402.03300,
equation 4). Hardware: 2 CPU cores.
Command: python -m jaxrl_post.main --config=configs/demo_dr_grpo.py
Expected: as the demo, more slowly where groups are lopsided.
"""

from pathlib import Path

from jaxrl_post.config import load

HERE = Path(__file__).resolve().parent


def get_config():
    c = load(str(HERE / "demo.py"))
    c.name = "demo_dr_grpo"
    c.algorithm.adv_estimator, c.algorithm.loss_agg_mode = "dr_grpo", "seq-mean-token-sum-norm"
    c.algorithm.kl_loss_coef, c.algorithm.kl_loss_type = 1e-3, "k3"
    return c
