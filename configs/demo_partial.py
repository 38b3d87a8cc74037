"""The demo with partial rollouts and streaming: deferred rollouts keep their tokens, and groups are trained on as they
finish.

Recipe: that of configs/demo.py, with 96 prompts launched for 64 trained on. The others continue in a long round from
their prefixes (partial rollouts: Kimi k1.5, arXiv 2501.12599; APRIL, arXiv 2509.18521, but each group is deferred at
most once). Their older tokens come from older weights, so every token is weighted by pi_old / mu, truncated at 2.
Groups go to the learner 16 at a time while others are generated. The sum of the round's gradient is the same. On
devices that learner and engine share, streaming moves work and removes none.
Hardware: 2 CPU cores.
Command: python -m jaxrl_post.main --config=configs/demo_partial.py
Expected: off_policy/max is 0 except in long rounds, every third one. sched/num_groups_streamed is at most 48 of 64.
"""

from pathlib import Path

from jaxrl_post.config import load

HERE = Path(__file__).resolve().parent


def get_config():
    c = load(str(HERE / "demo.py"))
    c.name = "demo_partial"
    c.scheduler.name, c.scheduler.over, c.scheduler.prefix_mode = "tail_batching", 1.5, "recompute"
    c.scheduler.stream = 16
    c.algorithm.rollout_is = "token"
    return c
