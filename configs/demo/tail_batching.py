"""The demo with short and long rounds: slow groups wait for a long round, and nothing that was sampled is dropped.

Recipe: that of configs/demo.py. Rounds are RollPacker's (arXiv 2509.21009, section 4.1), without drops and redraws.
- A short round launches 80 prompts and trains on the 64 whose rollouts finish first.
- The other 16 are deferred with their tokens. At most 4 of the 16 go straight to the long round, because past
  rollouts of their prompts were long.
- After eight short rounds, a long round continues 128 deferred groups. It verifies their tokens under its own weights,
  so they are what these weights sample from the start.
- A long round has two batches, with one optimizer step each. The second is one step off-policy, as any mini-batch is.

Hardware: 2 CPU cores.
Command: python -m jaxrl_post.main --config=configs/demo/tail_batching.py
Expected in metrics.jsonl: sched/num_groups_deferred and sched/num_groups_sent_long add up to 16 in every short round.
sched/num_long_rounds is 1 in every ninth round. At learning rate 0 the run trains on exactly the rollouts of
configs/demo.py.
"""

from pathlib import Path

from jaxrl_post.config import load

CONFIGS = Path(__file__).resolve().parents[1]


def get_config():
    c = load(str(CONFIGS / "demo.py"))
    c.name = "demo_tail_batching"
    c.scheduler.name = "tail_batching"
    # Why 1.25: RollPacker's own value (arXiv 2509.21009, section 4.1). Of 80 groups 16 are late.
    c.scheduler.over = 1.25
    # Why 0.25: it shows the lane. With free slots 0 is faster (faster.json: 115 s a step, 128 s with 0.25, 141 s with 0.5).
    c.scheduler.lane = 0.25
    # Why 2: `verify` generates long rollouts anew, so a long round lasts as long as a synchronous one, whatever it trains.
    c.scheduler.long_batches = 2
    return c
