"""The demo's task and policy, sampled with top-k and top-p.

Recipe: GRPO as in configs/demo.py, but answers are drawn from the 8 likeliest tokens, and of those from the ones that
hold 95 % of the mass (nucleus sampling, arXiv 1904.09751). The learner's log-probs are of the whole law, so each token's
loss is weighed by pi_old / mu, truncated at 2: mu, the engine's, is the cut law's. Evaluation draws from the whole law.
Hardware: 2 CPU cores, 1 to 3 minutes. Command: python -m jaxrl_post.main --config=configs/nucleus.py
Expected: held-out mean of 4 from 0.37 to 0.94, greedy from 0.01 to 1.00, in 100 rounds (seed 0).
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
