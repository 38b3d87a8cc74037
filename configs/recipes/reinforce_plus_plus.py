"""REINFORCE++ on the demo's task and policy: no groups are compared.

Recipe (arXiv 2501.03262):
- The reward of every token is lowered by kl_coef times k1 of the KL to the reference.
- The return is summed from each token on, undiscounted, and whitened over all tokens of the round.
- PPO's clipping has a ceiling of 3 for bad rollouts (dual clip, arXiv 1912.09729).
- Rollouts are rejected where engine and learner differ by more than a factor of 1.05 a token, in the geometric mean.

Hardware: 2 CPU cores. Command: python -m jaxrl_post.main --config=configs/recipes/reinforce_plus_plus.py
Expected: not measured yet. The demo's own figures are in scripts/results/demo.json.
"""

from pathlib import Path

from jaxrl_post.config import load

CONFIGS = Path(__file__).resolve().parents[1]


def get_config():
    c = load(str(CONFIGS / "demo.py"))
    c.name = "reinforce_plus_plus"
    c.algorithm.adv_estimator, c.algorithm.gamma = "reinforce_plus_plus", 1.0
    c.algorithm.use_kl_in_reward, c.algorithm.kl_coef = True, 1e-3
    c.algorithm.clip_ratio_c = 3.0
    c.algorithm.rollout_rs, c.algorithm.rollout_rs_threshold = "seq_mean_k1", (1.05,)
    return c
