"""The demo's task and policy, sampled with top-k and top-p.

Recipe: GRPO as in configs/demo.py. Tokens are sampled from the 8 most likely ones, and among these from those that
hold 95 % of the mass (nucleus sampling, arXiv 1904.09751). The learner's log-probs are those of the whole
distribution, and mu, the engine's, are those of the cut one. So each token's loss is weighted by pi_old / mu,
truncated at 2. Evaluation samples from the whole distribution.
Hardware: that of the demo. Command: python -m jaxrl_post.main --config=configs/nucleus.py
Expected: scripts/results/ has no figures of this recipe yet. show.py spec-law proves that the engine samples from the
cut distribution.
"""

from pathlib import Path

from jaxrl_post.config import load

HERE = Path(__file__).resolve().parent


def get_config():
    c = load(str(HERE / "demo.py"))
    c.name = "nucleus"
    c.sampling.top_k, c.sampling.top_p = 8, 0.95
    c.algorithm.rollout_is, c.algorithm.rollout_is_threshold = "token", (2.0,)
    return c
