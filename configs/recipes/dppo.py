"""DPPO on the demo's task and policy: a trust region of probabilities in the place of a clipped ratio.

Recipe (arXiv 2602.04879): a token leaves the loss where its probability has moved by more than 0.2 in the direction of
its advantage, from that of the engine. The ratio is a weight of at most 20. A round has four mini-batches.
Hardware: 2 CPU cores. Command: python -m jaxrl_post.main --config=configs/recipes/dppo.py
Expected: not measured yet. The demo's own figures are in scripts/results/demo.json.
"""

from pathlib import Path

from jaxrl_post.config import load

CONFIGS = Path(__file__).resolve().parents[1]


def get_config():
    c = load(str(CONFIGS / "demo.py"))
    c.name = "dppo"
    c.algorithm.loss_mode, c.algorithm.prox_logp_method = "dppo_tv", "rollout"
    c.algorithm.clip_ratio_low, c.algorithm.clip_ratio_high, c.algorithm.clip_ratio_c = 0.2, 0.2, 20.0
    c.scheduler.mini_batches, c.scheduler.ppo_epochs = 4, 1
    c.eval.every = 20
    return c
