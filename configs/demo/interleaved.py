"""The pipelined demo with training and generation by turns: no rollout waits for a whole optimizer step.

Recipe: that of configs/demo/pipeline.py. Training and generation alternate by micro-batch. During an optimizer step
the engine gets as many seconds as the learner. They are computed from step costs, so a repetition alternates at the
same points.
Use: only where the latency of rollouts matters. On shared devices interleaving saves no time, because the work is the
same. New weights arrive later, so tokens are older. No group is begun while 96 complete ones wait for the learner.
Hardware: 2 CPU cores.
Command: python -m jaxrl_post.main --config=configs/demo/interleaved.py
Expected: as configs/demo/pipeline.py, with a larger off_policy/mean.
"""

from pathlib import Path

from jaxrl_post.config import load

CONFIGS = Path(__file__).resolve().parents[1]


def get_config():
    c = load(str(CONFIGS / "demo/pipeline.py"))
    c.name = "demo_interleaved"
    # Why 1: engine and learner get equal time while a step is trained.
    c.scheduler.interleave = 1.0
    # Why 96: as many as may be unscored, which is the least value. New weights arrive late here, so tokens would age.
    c.scheduler.max_ready = 96
    # Why 8: half of the demo's micro-batch, so that the engine waits half as long for its turn.
    c.batch.rows = 8
    return c
