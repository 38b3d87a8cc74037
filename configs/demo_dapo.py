"""Clip-higher, token-mean loss and dynamic sampling on the demo's task.

Recipe: DAPO (arXiv 2503.14476): clip range 0.2 below and 0.28 above (section 3.1), groups whose answers are all right or
all wrong are left out and refilled (3.2), loss averaged over tokens (3.3). A small entropy bonus keeps answers apart so that
there is something to sample from. Hardware: 2 CPU cores.
Command: python -m jaxrl_post.main --config=configs/demo_dapo.py
Expected: as the demo in fewer steps of more rollouts each; sched/num_groups_filtered says how many more.
"""

from pathlib import Path

from jaxrl_post.config import load

HERE = Path(__file__).resolve().parent


def get_config():
    c = load(str(HERE / "demo.py"))
    c.name, c.steps = "demo_dapo", 30
    c.algorithm.clip_ratio_low, c.algorithm.clip_ratio_high = 0.2, 0.28
    c.algorithm.loss_agg_mode, c.algorithm.entropy_coef = "token-mean", 1e-3
    c.scheduler.filter_groups, c.scheduler.max_waves = True, 10
    return c
