"""The demo without rounds: slots are filled as they come free, and new weights go under the answers that run.

Recipe: that of configs/demo.py with PipelineRL's schedule (arXiv 2509.19128): each optimizer step trains on the oldest 64
groups that are whole, and generation waits for nobody but the bound: no token is older than `max_staleness` optimizer steps
when it is trained on. Answers on their way when weights are published are verified where half of them will probably survive,
else their keys and values are computed again, within a tenth of all rows; beyond that they keep what they have. The loss is
decoupled PPO's with the proximal policy between engine and learner by how old a token is (arXiv 2512.06547), which costs no
pass of its own. Should tokens drift too far from the weights that train on them, batches move nothing until one is on-policy
again.
Hardware: 2 CPU cores.
Command: python -m jaxrl_post.main --config=configs/demo_pipeline.py
Expected: metrics.jsonl has off_policy/{mean,max}, sched/paused_steps (engine steps in which the bound held admission back) and
rollout_corr/ess in every step, and off_policy/share_N where a token is stale; scripts/show.py staleness.
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
