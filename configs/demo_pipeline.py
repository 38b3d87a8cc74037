"""The demo without rounds: free slots are filled at once, and new weights are swapped in under running rollouts.

Recipe: that of configs/demo.py with PipelineRL's schedule (arXiv 2509.19128).
- Each optimizer step trains on the oldest 64 complete groups.
- Only the staleness bound holds generation back: no token is older than `max_staleness` optimizer steps when it is
  trained on.
- At a publish, running rollouts are verified if half of them will probably survive. Otherwise their keys and values
are
  computed again. Both together take at most a tenth of all rows. Beyond that, rollouts keep their cache.
- The loss is decoupled PPO's. Its proximal policy lies between engine and learner by the age of a token
  (arXiv 2512.06547), which costs no forward pass.
- If tokens are too far from the weights that train on them, updates are skipped until a batch is on-policy again.

Hardware: 2 CPU cores.
Command: python -m jaxrl_post.main --config=configs/demo_pipeline.py
Expected in metrics.jsonl: off_policy/{mean,max}, rollout_corr/ess and sched/paused_steps (engine steps in which the
bound held admission back) in every step, and off_policy/share_N where a token is stale. See scripts/show.py staleness.
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
