"""The demo without rounds: free slots are filled at once, and running rollouts get new weights (in-flight update).

Recipe: that of configs/demo.py with PipelineRL's schedule (arXiv 2509.19128).
- Each optimizer step trains on the oldest 64 complete groups.
- Only the staleness bound holds generation back. No trained token is older than `max_staleness` optimizer steps.
- At a weight sync, running rollouts are verified where at least half of their tokens will probably be accepted. For
  other rollouts the KV cache is recomputed. Both may use a tenth of all rows. Beyond that, rollouts keep the KV cache.
- The loss is that of decoupled PPO. The proximal policy is placed between engine and learner by the age of a token
  (arXiv 2512.06547), so it needs no forward pass of its own.
- If tokens are too far from the weights that train on them, updates are skipped until a batch is on-policy again.

Hardware: 2 CPU cores.
Command: python -m jaxrl_post.main --config=configs/demo/pipeline.py
Expected in every step of metrics.jsonl: off_policy/{mean,max}, rollout_corr/ess and sched/paused_steps.
off_policy/share_N appears where a token is stale. sched/paused_steps counts engine steps without admission because of
the bound. See also scripts/show.py staleness.
"""

from pathlib import Path

from jaxrl_post.config import load

CONFIGS = Path(__file__).resolve().parents[1]


def get_config():
    c = load(str(CONFIGS / "demo.py"))
    c.name = "demo_pipeline"
    c.scheduler.name = "pipeline"
    # Why 4: at this bound `keep` has 1.05 times the KL of `recompute`, and at 8 it has 2.76 times (modes.json).
    c.scheduler.max_staleness = 4
    # Why 16: a dispatch ends once engine.refill_slots=8 slots are free, one group. Two groups wait, so that none stays empty.
    c.scheduler.ahead = 16
    # Why 96: one batch of 64 and half of the next may wait for graders, so that a slow one does not stop the ring.
    c.scheduler.max_unscored = 96
    # Why 0.1: what swaps compute again takes at most a tenth of the rows; rollouts beyond it keep their KV cache.
    c.engine.carry_over, c.engine.carry_share = "auto", 0.1
    # Why loglinear: the proximal policy then needs no forward pass. It weighs token by token.
    c.algorithm.prox_logp_method, c.algorithm.rollout_is = "loglinear", "token"
    # Why 0.5 and 0.2: far outside of what sound runs have (modes.json: above 0.999, and below 0.001), so only accidents trip.
    c.algorithm.min_ess, c.algorithm.max_rollout_kl = 0.5, 0.2
    return c
