"""The demo's task and policy, sampled with top-k and top-p.

Recipe: GRPO as in configs/demo.py, but answers are drawn from the 8 likeliest tokens, and of those from the ones that
hold 95 % of the mass (nucleus sampling, arXiv 1904.09751). The learner's log-probs are of the whole law, so each token's
loss is weighed by pi_old / mu, truncated at 2: mu, the engine's, is the cut law's. Evaluation draws from the whole law.
Hardware: that of the demo. Command: python -m jaxrl_post.main --config=configs/nucleus.py
Expected: nothing measured stands in scripts/results/ yet. That the engine draws from the cut law: show.py spec-law.
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
