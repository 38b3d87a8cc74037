"""The demo with partial rollouts, streamed: deferred rollouts keep their tokens, and training starts early.

Recipe: that of configs/demo.py. A short round launches 96 prompts and trains on 64. The others continue in a long
round from their tokens (partial rollouts: Kimi k1.5, arXiv 2501.12599; APRIL, arXiv 2509.18521). Unlike APRIL, a group
is deferred at most once. Tokens of older weights are corrected: every token is weighed by pi_old / mu, truncated at 2.
Streaming: the learner gets 16 groups at a time while others are generated. The sum of the round's gradient is the
same. On devices that learner and engine share, this moves work and removes none.
Hardware: 2 CPU cores.
Command: python -m jaxrl_post.main --config=configs/demo/partial.py
Expected: off_policy/max is 0 except in long rounds, every third one. sched/num_groups_streamed is at most 48 of 64.
"""

from pathlib import Path

from jaxrl_post.config import load

CONFIGS = Path(__file__).resolve().parents[1]


def get_config():
    c = load(str(CONFIGS / "demo.py"))
    c.name = "demo_partial"
    c.scheduler.name, c.scheduler.prefix_mode = "tail_batching", "recompute"
    # Why 1.5: every third round is long, so that no token is older than two optimizer steps.
    c.scheduler.over = 1.5
    # Why 16: a quarter of a round, so that three of four parts can be trained on before the round ends.
    c.scheduler.stream = 16
    # Why token: tokens of older weights are few and stand apart, so each is weighed by itself.
    c.algorithm.rollout_is = "token"
    return c
