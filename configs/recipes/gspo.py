"""GSPO on the demo's task and policy.

Recipe (arXiv 2507.18071): one ratio per rollout, the geometric mean of its tokens' ratios, is clipped. The loss is a
mean over rollouts. A round's 64 prompts are trained on in four mini-batches, so that there is something to clip. The
paper's bounds, 3e-4 and 4e-4 (section 5.1), suit its small steps. The demo's steps are large, so the bounds are 100
times wider.
Hardware: 2 CPU cores. Command: python -m jaxrl_post.main --config=configs/recipes/gspo.py
Expected: not measured yet. The demo's own figures are in scripts/results/demo.json.
"""

from pathlib import Path

from jaxrl_post.config import load

CONFIGS = Path(__file__).resolve().parents[1]


def get_config():
    c = load(str(CONFIGS / "demo.py"))
    c.name = "gspo"
    c.algorithm.loss_mode, c.algorithm.loss_agg_mode = "gspo", "seq-mean-token-mean"
    c.algorithm.clip_ratio_low, c.algorithm.clip_ratio_high = 3e-2, 4e-2
    c.scheduler.mini_batches, c.scheduler.ppo_epochs = 4, 1
    c.eval.every = 20
    return c
