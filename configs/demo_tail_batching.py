"""The demo with short and long rounds: slow groups wait for a round of their own, and no sampled token is dropped.

Recipe: that of configs/demo.py.
- A short round launches 80 prompts and trains on the 64 whose rollouts finish first. It defers the other 16 with their
  prefixes. At most 4 of the 16 go to the long round at once: those whose history has long rollouts.
- After eight short rounds a long round resumes 128 groups and verifies them under its own weights. Their tokens are
those
  that these weights sample from the start (RollPacker, arXiv 2509.21009, section 4.1, without its dropping and
  resampling).
- The long round makes two batches with one optimizer step each. The second is one step off-policy, like any
mini-batch.

Hardware: 2 CPU cores.
Command: python -m jaxrl_post.main --config=configs/demo_tail_batching.py
Expected in metrics.jsonl: sched/num_groups_deferred and sched/num_groups_sent_long add up to 16 in every short round.
sched/num_long_rounds is 1 in every ninth round. At learning rate 0 the run trains on the same rollouts as
configs/demo.py.
"""

from pathlib import Path

from jaxrl_post.config import load

HERE = Path(__file__).resolve().parent


def get_config():
    c = load(str(HERE / "demo.py"))
    c.name = "demo_tail_batching"
    c.scheduler.name, c.scheduler.over, c.scheduler.lane, c.scheduler.long_batches = "tail_batching", 1.25, 0.25, 2
    return c
