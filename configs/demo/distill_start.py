"""Distillation into random weights on the demo's task: a student learns from rows that a teacher wrote.

A policy of random weights writes nothing that a teacher could correct. So the teacher writes first, and the student's whole
law at every token is brought to the teacher's (GKD with lambda 0, arXiv 2306.13649). No reward is read. The teacher
is what configs/demo.py ends with.
Rows: one rollout of the teacher at temperature 1 to each of 8,192 prompts, wrong ones included.
Recipe: that of configs/demo/sft.py with the forward KL, 1,600 steps of 56 rows.
Hardware: 2 CPU cores.
Commands: python -m jaxrl_post.main --config=configs/demo.py --run-dir=runs/demo_teacher
          python -m jaxrl_post generate --policy runs/demo_teacher --data PROMPTS --max-tokens 95 --json runs/demo_rows.jsonl
          python -m jaxrl_post.main --config=configs/demo/distill_start.py
PROMPTS is a JSONL file of prompts. The show prefer-and-distil writes one, of a split that the demo uses neither for
training nor for held-out prompts.
Expected: at least 90 % of the teacher's reward on held-out prompts (python scripts/show.py prefer-and-distil). With a
teacher of 0.94, the mean of 4 went from 0.002 to 0.93, and greedy from 0.00 to 1.00.
"""

from pathlib import Path

from jaxrl_post.config import default, load

CONFIGS = Path(__file__).resolve().parents[1]


def get_config():
    c = load(str(CONFIGS / "demo/sft.py"))
    c.name, c.steps = "demo_distill_start", 1600
    c.teacher.path, c.teacher.dtype = "runs/demo_teacher/policy", "bfloat16"
    c.algorithm.adv_estimator, c.algorithm.loss_mode, c.algorithm.gkd_beta = "distill", "gkd", 0.0
    c.scheduler.prompts = 56
    c.data = default().data
    c.data.train, c.data.columns = "runs/demo_rows.jsonl", {"id": "prompt_id", "completion": "text"}
    c.eval.data, c.eval.task = "task:sums", {}
    c.eval.completions, c.eval.every = 0, 800
    c.alarms.max_mismatch = 0.0  # the student is not the engine that wrote the rows
    return c
