"""The pipelined demo in which training and generation take turns by micro-batch: no rollout waits for a whole
optimizer step.

Recipe: that of configs/demo_pipeline.py. During an optimizer step the engine gets as many seconds as the learner.
Seconds follow from the step costs, so a repetition takes the same turns. On shared devices this saves no time: the
work stays the same, and new weights arrive later, so tokens are older. It is for rollouts whose reader waits.
Hardware: 2 CPU cores.
Command: python -m jaxrl_post.main --config=configs/demo_interleaved.py
Expected: as configs/demo_pipeline.py, with a larger off_policy/mean.
"""

from pathlib import Path

from jaxrl_post.config import load

HERE = Path(__file__).resolve().parent


def get_config():
    c = load(str(HERE / "demo_pipeline.py"))
    c.name, c.scheduler.interleave = "demo_interleaved", 1.0
    c.batch.rows = 8
    return c
