"""On-policy distillation on the demo's task: the demo's own policy learns from a teacher that was trained by RL.

The student samples, and its whole law at every token is brought to the teacher's (GKD, arXiv 2306.13649). No reward is
read. The teacher is what configs/demo.py ends with.
Hardware: 2 CPU cores.
Commands: python -m jaxrl_post.main --config=configs/demo.py --run-dir=runs/demo_teacher
          python -m jaxrl_post.main --config=configs/demo/distill.py
Expected: at least 90 % of the teacher's reward on held-out prompts (python scripts/show.py prefer-and-distil). A
teacher of 100 steps has a mean of 4 of 0.94. From it, the 40 steps take the mean of 4 from 0.37 to 0.97.
From random weights this is slow: 400 steps of 128 rollouts, forward KL, reached 0.38, and greedy 0.59. So a student of
random weights begins with rows of the teacher (configs/demo/distill_start.py).
"""

from pathlib import Path

from jaxrl_post.config import load

CONFIGS = Path(__file__).resolve().parents[1]


def get_config():
    c = load(str(CONFIGS / "demo.py"))
    c.name, c.steps = "demo_distill", 40
    c.teacher.path, c.teacher.dtype = "runs/demo_teacher/policy", "bfloat16"
    c.algorithm.adv_estimator, c.algorithm.loss_mode, c.algorithm.gkd_beta = "distill", "gkd", 0.5
    c.scheduler.group_size = 1
    c.optimizer.lr, c.optimizer.eps, c.optimizer.max_grad_norm = 1e-3, 1e-8, 1.0
    c.optimizer.schedule, c.optimizer.final_lr_ratio = "cosine", 0.02
    c.eval.every = 20
    return c
