"""REINFORCE++ on the demo's task and policy: no groups are compared.

Recipe (arXiv 2501.03262): the reward of every token loses kl_coef times k1 of the KL to the reference, the return is
summed from each token on, undiscounted, and whitened over all tokens of the round; PPO's clipping with a ceiling of 3
for bad answers (dual clip, arXiv 1912.09729). Answers on which engine and learner disagree by more than a factor of
1.05 a token, in the geometric mean, are rejected.
Hardware: 2 CPU cores. Command: python -m jaxrl_post.main --config=configs/reinforce_plus_plus.py
Expected: nothing measured stands in scripts/results/ yet; the demo's own figures are in scripts/results/demo.json.
"""

from pathlib import Path

from jaxrl_post.config import load

HERE = Path(__file__).resolve().parent


def get_config():
    c = load(str(HERE / "demo.py"))
    c.name = "reinforce_plus_plus"
    c.algorithm.adv_estimator, c.algorithm.gamma = "reinforce_plus_plus", 1.0
    c.algorithm.use_kl_in_reward, c.algorithm.kl_coef = True, 1e-3
    c.algorithm.clip_ratio_c = 3.0
    c.algorithm.rollout_rs, c.algorithm.rollout_rs_threshold = "seq_mean_k1", (1.05,)
    return c
