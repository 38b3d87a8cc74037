"""SAPO on the demo's task and policy.

Recipe (arXiv 2511.20347): a soft gate replaces clipping. It is a little narrower for negative advantages. The loss is
a mean over the tokens of each rollout and then over rollouts. A round has two mini-batches and two epochs.
Hardware: 2 CPU cores. Command: python -m jaxrl_post.main --config=configs/sapo.py
Expected: scripts/results/ has no figures of this recipe yet. Those of the demo are in scripts/results/demo.json.
"""

from pathlib import Path

from jaxrl_post.config import load

HERE = Path(__file__).resolve().parent


def get_config():
    c = load(str(HERE / "demo.py"))
    c.name = "sapo"
    c.algorithm.loss_mode, c.algorithm.loss_agg_mode = "sapo", "seq-mean-token-mean"
    c.algorithm.tau_pos, c.algorithm.tau_neg = 1.0, 1.05
    c.scheduler.mini_batches, c.scheduler.ppo_epochs = 2, 2
    c.eval.every = 20
    return c
