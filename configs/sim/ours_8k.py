"""Tail batching that drops nothing, part by part, on RollPacker's fitted workload of at most 8k (arXiv 2509.21009).

Parts:
- Tail batching: 1.5 times the prompts are launched. Groups that finish last continue in a long round (recompute).
- Placement: a rollout is bound to a replica when a slot is free.
- Drafts: where at most 16 rollouts of a replica run, each gets two tokens a step, at the cost of four more rows. Seer
  (arXiv 2511.14617) has 2.04 tokens with one sibling to learn from.

Between two versions a token changes with probability 0.001. Lengths and seconds of rollouts are those of
configs/sim/rollpacker_8k.py.
Command: python -m jaxrl_post.simulate --config=configs/sim/ours_8k.py
Expected: scripts/results/faster.json. RollPacker's own speed-up of the rollout is 1.7.
"""

from pathlib import Path

from jaxrl_post.config import load

HERE = Path(__file__).resolve().parent


def get_config():
    c = load(str(HERE / "rollpacker_8k.py"))
    c.name, c.rounds, c.fitted = "ours 8k", 15, ()
    c.workload.tv, c.learner.step_s = 0.001, 0.0
    c.scheduler.name, c.scheduler.over, c.scheduler.over_samples = "sync", 1.0, 1.0
    # Why 1.5: a step takes 46.0 s of rollout in this simulation, and 53.7 s with 1.25.
    c.parts = (
        "tail batching: scheduler.name=tail_batching scheduler.over=1.5 scheduler.prefix_mode=recompute",
        "placement: scheduler.placement=divided",
        "drafts in the tail: cluster.draft_tokens=2.0 cluster.draft_width=4 cluster.draft_running=16",
    )
    c.published = {"rollout_speedup_over_sync": 1.7}
    return c
