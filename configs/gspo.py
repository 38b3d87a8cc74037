"""GSPO on the demo's task and policy.

Recipe (arXiv 2507.18071): a rollout has one ratio, the clipped geometric mean of its tokens' ratios. The loss is a
mean over rollouts. A round's 64 prompts make four mini-batches, so that some ratios are clipped. The paper's bounds,
3e-4 and 4e-4 (section 5.1), belong to its small steps. The demo's steps are large, so the bounds here are 100 times
wider.
Hardware: 2 CPU cores. Command: python -m jaxrl_post.main --config=configs/gspo.py
Expected: scripts/results/ has no figures of this recipe yet. Those of the demo are in scripts/results/demo.json.
"""

from pathlib import Path

from jaxrl_post.config import load

HERE = Path(__file__).resolve().parent


def get_config():
    c = load(str(HERE / "demo.py"))
    c.name = "gspo"
    c.algorithm.loss_mode, c.algorithm.loss_agg_mode = "gspo", "seq-mean-token-mean"
    c.algorithm.clip_ratio_low, c.algorithm.clip_ratio_high = 3e-2, 4e-2
    c.scheduler.mini_batches, c.scheduler.ppo_epochs = 4, 1
    c.eval.every = 20
    return c
