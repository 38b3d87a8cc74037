"""CISPO with ScaleRL's averaging, on the demo's task and policy.

Recipe:
- Every token keeps its gradient. It is weighed by its ratio, without a lower bound (MiniMax-M1, arXiv 2506.13585). The
  upper bound is 5 (ScaleRL, arXiv 2510.13786).
- The loss is a mean over prompts of the mean over the tokens of all their rollouts.
- Advantages are centred in the group and scaled by the deviation of the whole batch (ScaleRL).
- Each token is weighed by min(pi_old / mu, 2), which corrects for differences between engine and learner.
- A round has four mini-batches.

Hardware: 2 CPU cores. Command: python -m jaxrl_post.main --config=configs/recipes/cispo.py
Expected: not measured yet. The demo's own figures are in scripts/results/demo.json.
"""

from pathlib import Path

from jaxrl_post.config import load

CONFIGS = Path(__file__).resolve().parents[1]


def get_config():
    c = load(str(CONFIGS / "demo.py"))
    c.name = "cispo"
    c.algorithm.adv_estimator = "reinforce_plus_plus_baseline"
    c.algorithm.loss_mode, c.algorithm.loss_agg_mode = "cispo", "prompt-mean"
    c.algorithm.clip_ratio_low, c.algorithm.clip_ratio_high = 1.0, 4.0
    c.algorithm.rollout_is, c.algorithm.rollout_is_threshold = "token", (2.0,)
    c.scheduler.mini_batches = 4
    c.eval.every = 20
    return c
