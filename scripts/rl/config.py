"""GRPO on prompts and rollouts of about GSM8K's lengths, for scripts/rl_check.py, on one device.

A step has 16 prompts x 8 rollouts of at most 512 tokens, and as many slots. 32 prompts come again every two steps, so that
there are past rollouts to draft from. Random weights draw nearly evenly from 256 tokens, one of which ends a rollout. So
lengths are those of a geometric distribution that is cut at 512: 221 tokens on average.
Hardware: one GPU or TPU with room for the shape.
"""

from pathlib import Path

from jaxrl_post.config import default

HERE = Path(__file__).resolve().parent


def get_config():
    c = default()
    c.name, c.steps = "rl_check", 10
    c.model.compute_dtype, c.model.remat = "bfloat16", True

    c.engine.dtype, c.engine.slots, c.engine.max_length, c.engine.page_size = "bfloat16", 128, 768, 64
    c.engine.row_sizes, c.engine.steps_per_dispatch, c.engine.refill_slots = (128, 256), 16, 8
    c.sampling.max_tokens = 512
    c.scheduler.prompts, c.scheduler.group_size = 16, 8

    c.optimizer.lr = 1e-6
    c.batch.rows, c.batch.tokens, c.batch.head_chunk = 4, 2048, 1024

    c.data.format, c.data.columns = "trl", {"prompt": "question", "answer": "answer"}
    c.reward.functions = (f"{HERE.parent / 'gpu' / 'rl_reward.py'}:digits",)
    c.eval.prompts, c.checkpoint.every, c.history.epochs = 0, 0, 2
    return c
