"""GSPO on the demo's task and policy.

Recipe (arXiv 2507.18071): one ratio per answer, the geometric mean of its tokens' ratios, clipped; the loss a mean over
answers; a round's 64 prompts are trained on in four mini-batches, so that there is something to clip. The paper's
bounds, 3e-4 and 4e-4 (section 5.1), belong to its small steps: after one of the demo's, nine tokens of ten are clipped.
They are 100 times wider here.
Hardware: 2 CPU cores, 1 to 3 minutes. Command: python -m jaxrl_post.main --config=configs/gspo.py
Expected: held-out mean of 4 from 0.37 to 0.97, greedy from 0.01 to 1.00, in 25 rounds, 197,000 sampled tokens (seed 0);
2 % of the tokens are clipped in the last of a round's four steps, 9 % at most. With the paper's bounds 0.84.
"""

from pathlib import Path

from jaxrl_post.config import load

HERE = Path(__file__).resolve().parent


def get_config():
    c = load(str(HERE / "demo.py"))
    c.name = "gspo"
    c.algorithm.loss_mode, c.algorithm.loss_agg_mode = "gspo", "seq-mean-token-mean"
    c.algorithm.clip_ratio_low, c.algorithm.clip_ratio_high = 3e-2, 4e-2
    c.scheduler.mini_batches, c.scheduler.ppo_epochs = 4, 1
    c.eval.every = 20
    return c
