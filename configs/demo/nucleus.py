"""The demo's task and policy, sampled with top-k and top-p.

Recipe: GRPO as in configs/demo.py, with tokens sampled from a cut distribution. It has the 8 most likely tokens, and
of them the ones that hold 95 % of the probability (nucleus sampling, arXiv 1904.09751). The engine's log-probs, mu,
are of the cut distribution, and the learner's are of the full one, as verl's: no ids are recorded. So each token's loss
is weighed by pi_old / mu, truncated at 2. configs/recipes/deepseek_v3_2.py records ids instead. Evaluation samples from
the full distribution.
Hardware: that of the demo. Command: python -m jaxrl_post.main --config=configs/demo/nucleus.py
Expected: not measured yet. show.py spec-law checks that the engine samples from the cut distribution.
"""

from pathlib import Path

from jaxrl_post.config import load

CONFIGS = Path(__file__).resolve().parents[1]


def get_config():
    c = load(str(CONFIGS / "demo.py"))
    c.name = "nucleus"
    c.sampling.top_k, c.sampling.top_p = 8, 0.95
    c.sampling.keep_mask = False
    c.algorithm.rollout_is, c.algorithm.rollout_is_threshold = "token", (2.0,)
    return c
