"""Tail batching that drops nothing, part by part, on RollPacker's fitted workload of at most 16k (arXiv 2509.21009).

Parts:
- Tail batching: 1.375 times the prompts are launched. Groups that finish last continue in a long round (recompute).
- Placement: a rollout is bound to a replica when a slot is free.
- Drafts: where at most 16 rollouts of a replica run, each gets two tokens a step, at the cost of four more rows. Seer
  (arXiv 2511.14617) has 2.04 tokens with one sibling to learn from.

Between two versions a token changes with probability 0.001. Lengths and seconds of rollouts are those of
configs/sim/rollpacker_16k.py.
Command: python -m jaxrl_post.simulate --config=configs/sim/ours_16k.py
Expected: scripts/results/faster.json. RollPacker's own speed-up of the rollout is 3.1.
"""

from pathlib import Path

from jaxrl_post.config import load

HERE = Path(__file__).resolve().parent


def get_config():
    c = load(str(HERE / "rollpacker_16k.py"))
    c.name, c.rounds, c.fitted = "ours 16k", 22, ()
    c.workload.tv, c.learner.step_s = 0.001, 0.0
    c.scheduler.name, c.scheduler.over, c.scheduler.over_samples = "sync", 1.0, 1.0
    # Why 1.375: a step takes 115.5 s of rollout in this simulation, 119.2 s with 1.25 and 120.3 s with 1.5.
    c.parts = (
        "tail batching: scheduler.name=tail_batching scheduler.over=1.375 scheduler.prefix_mode=recompute",
        "placement: scheduler.placement=divided",
        "drafts in the tail: cluster.draft_tokens=2.0 cluster.draft_width=4 cluster.draft_running=16",
    )
    c.published = {"rollout_speedup_over_sync": 3.1}
    return c
