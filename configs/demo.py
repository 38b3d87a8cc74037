"""GRPO."""

from pathlib import Path

from jaxrl_post.config import default

HERE = Path(__file__).resolve().parent


def get_config():
    c = default()
    c.name, c.steps = "demo", 80
    c.model.path = str(HERE / "demo_policy")

    c.engine.slots, c.engine.max_length, c.engine.page_size = 64, 116, 16
    c.engine.row_sizes = (64, 128)
    c.sampling.max_tokens = 96
    c.scheduler.prompts, c.scheduler.group_size = 64, 8

    c.optimizer.lr, c.optimizer.eps, c.optimizer.max_grad_norm = 2.5e-3, 0.1, 0.0
    c.batch.rows, c.batch.tokens, c.batch.head_chunk = 16, 128, 2048

    c.data.train, c.data.size = "task:sums", 2560
    c.eval.prompts, c.eval.every = 256, 20
    return c
