"""DRO on the demo's task and policy: the plain policy gradient, held at the old policy by a squared log-ratio.

Recipe (arXiv 2405.19107; verl's dro with its dro_beta of 0.1). With the advantage R - mean it is also the loss of Kimi k1.5
(arXiv 2501.12599, section 2.3.2). A round has four mini-batches, so that there is something to hold.
Hardware: 2 CPU cores. Command: python -m jaxrl_post.main --config=configs/recipes/dro.py
Expected: not measured yet. The demo's own figures are in scripts/results/demo.json.
"""

from pathlib import Path

from jaxrl_post.config import load

CONFIGS = Path(__file__).resolve().parents[1]


def get_config():
    c = load(str(CONFIGS / "demo.py"))
    c.name = "dro"
    c.algorithm.adv_estimator, c.algorithm.loss_mode, c.algorithm.old_kl_coef = "dr_grpo", "dro", 0.1
    c.scheduler.mini_batches, c.scheduler.ppo_epochs = 4, 1
    c.eval.every = 20
    return c
