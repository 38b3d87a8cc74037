"""CISPO with ScaleRL's averaging, on the demo's task and policy.

Recipe:
- Every token keeps its gradient. Its ratio is bounded by 5 from above and not from below (MiniMax-M1, arXiv
2506.13585;
  the value 5 is ScaleRL's, arXiv 2510.13786).
- The loss is a mean over prompts of the mean over all tokens of the prompt's rollouts.
- Advantages are centred in the group and divided by the standard deviation of the whole batch (ScaleRL).
- Each token is weighted by min(pi_old / mu, 2) against the mismatch of engine and learner.
- A round has four mini-batches.

Hardware: 2 CPU cores. Command: python -m jaxrl_post.main --config=configs/cispo.py
Expected: scripts/results/ has no figures of this recipe yet. Those of the demo are in scripts/results/demo.json.
"""

from pathlib import Path

from jaxrl_post.config import load

HERE = Path(__file__).resolve().parent


def get_config():
    c = load(str(HERE / "demo.py"))
    c.name = "cispo"
    c.algorithm.adv_estimator = "reinforce_plus_plus_baseline"
    c.algorithm.loss_mode, c.algorithm.loss_agg_mode = "cispo", "prompt-mean"
    c.algorithm.clip_ratio_low, c.algorithm.clip_ratio_high = 1.0, 4.0
    c.algorithm.rollout_is, c.algorithm.rollout_is_threshold = "token", (2.0,)
    c.scheduler.mini_batches = 4
    c.eval.every = 20
    return c
