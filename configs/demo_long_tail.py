"""The demo with a long tail."""

from pathlib import Path

from jaxrl_post.config import load

HERE = Path(__file__).resolve().parent


def get_config():
    c = load(str(HERE / "demo.py"))
    c.name, c.steps, c.trace_rounds = "demo_long_tail", 120, 12
    c.scheduler.prompts = 16
    c.data.size, c.data.task = 512, {"usual": 3, "gap": 5, "longest": 9, "tail": 0.06}
    c.eval.task, c.eval.every = c.data.task, 20
    return c
