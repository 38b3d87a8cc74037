"""The demo with short and long rounds: what is slow waits for a round of its own, and nothing that was drawn is dropped.

Recipe: that of configs/demo.py. A short round launches 80 prompts and trains on the 64 whose answers are there first; the
other 16 are put off with what they have. After eight short rounds a long one takes up 128 of those, verified under its own
weights: their tokens are what those weights give from the start (RollPacker, arXiv 2509.21009, section 4.1, without its
dropping and redrawing). It makes two batches, one optimizer step each, the second a step off-policy as any mini-batch is.
Of the 16 at most 4 go to the long round straight, where history knows their answers to be long.
Hardware: 2 CPU cores.
Command: python -m jaxrl_post.main --config=configs/demo_tail_batching.py
Expected: in metrics.jsonl sched/num_groups_deferred and sched/num_groups_sent_long together are 16 in every short round and
sched/num_long_rounds is 1 in every ninth round; at learning rate 0 the run trains on exactly the answers of configs/demo.py.
"""

from pathlib import Path

from jaxrl_post.config import load

HERE = Path(__file__).resolve().parent


def get_config():
    c = load(str(HERE / "demo.py"))
    c.name = "demo_tail_batching"
    c.scheduler.name, c.scheduler.over, c.scheduler.lane, c.scheduler.long_batches = "tail_batching", 1.25, 0.25, 2
    return c
