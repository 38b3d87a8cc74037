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
Command: python -m jaxrl_post.main --config=configs/demo_pipeline.py
Expected in every step of metrics.jsonl: off_policy/{mean,max}, rollout_corr/ess and sched/paused_steps.
off_policy/share_N appears where a token is stale. sched/paused_steps counts engine steps without admission because of
the bound. See also scripts/show.py staleness.
"""

from pathlib import Path

from jaxrl_post.config import load

HERE = Path(__file__).resolve().parent


def get_config():
    c = load(str(HERE / "demo.py"))
    c.name = "demo_pipeline"
    c.engine.carry_over, c.engine.carry_share = "auto", 0.1
    c.scheduler.name, c.scheduler.max_staleness, c.scheduler.ahead, c.scheduler.max_unscored = "pipeline", 4, 16, 96
    c.algorithm.prox_logp_method, c.algorithm.rollout_is = "loglinear", "token"
    c.algorithm.min_ess, c.algorithm.max_rollout_kl = 0.5, 0.2
    return c
