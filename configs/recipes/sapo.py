"""SAPO on the demo's task and policy.

Recipe (arXiv 2511.20347): a soft gate replaces clipping, a little narrower for bad rollouts than for good ones. The
loss is a mean over tokens within each rollout and then over rollouts. A round has two mini-batches and two passes.
Hardware: 2 CPU cores. Command: python -m jaxrl_post.main --config=configs/recipes/sapo.py
Expected: not measured yet. The demo's own figures are in scripts/results/demo.json.
"""

from pathlib import Path

from jaxrl_post.config import load

CONFIGS = Path(__file__).resolve().parents[1]


def get_config():
    c = load(str(CONFIGS / "demo.py"))
    c.name = "sapo"
    c.algorithm.loss_mode, c.algorithm.loss_agg_mode = "sapo", "seq-mean-token-mean"
    c.algorithm.tau_pos, c.algorithm.tau_neg = 1.0, 1.05
    c.scheduler.mini_batches, c.scheduler.ppo_epochs = 2, 2
    c.eval.every = 20
    return c
