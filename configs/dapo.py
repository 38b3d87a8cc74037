"""DAPO on the demo's task and policy.

Recipe (arXiv 2503.14476): clip range 0.2 below and 0.28 above (section 3.1); groups whose answers are all right or all
wrong are left out and refilled (3.2); the loss is a mean over tokens (3.3); answers cut at the limit leave the loss and
stay in the baseline, and within the last `overlong_buffer` tokens before it the reward sinks to -1 (3.4). A small
entropy bonus, not of the paper, keeps answers apart so that there is something to sample from.
Hardware: 2 CPU cores. Command: python -m jaxrl_post.main --config=configs/dapo.py
Expected: nothing measured stands in scripts/results/ yet; the demo's own figures are in scripts/results/demo.json.
"""

from pathlib import Path

from jaxrl_post.config import load

HERE = Path(__file__).resolve().parent


def get_config():
    c = load(str(HERE / "demo.py"))
    c.name, c.steps = "dapo", 40
    c.algorithm.clip_ratio_low, c.algorithm.clip_ratio_high = 0.2, 0.28
    c.algorithm.loss_agg_mode, c.algorithm.entropy_coef = "token-mean", 1e-3
    c.algorithm.overlong_buffer, c.algorithm.overlong_penalty, c.algorithm.overlong_filtering = 24, 1.0, True
    c.scheduler.filter_groups, c.scheduler.max_waves = True, 10
    c.eval.every = 20
    return c
