"""GRPO on random weights of Qwen2.5-0.5B's shape, for scripts/gpu_check.py: the policy learns to write digits.

Reward: the share of digits among the characters of a rollout (scripts/gpu/rl_reward.py). Random weights draw nearly
evenly from the 66 tokens that the tokenizer has, so that the reward begins near 0.15 and lengths differ.
Sizes: 16 prompts x 8 rollouts a step, of at most 96 tokens. 64 prompts come again every four steps, so that there are
past rollouts to draft from.
Hardware: one H100 or H200.
"""

from pathlib import Path

from jaxrl_post.config import default

HERE = Path(__file__).resolve().parent


def get_config():
    c = default()
    c.name, c.steps = "gpu_check", 20
    c.model.compute_dtype, c.model.remat = "bfloat16", True

    c.engine.dtype, c.engine.slots, c.engine.max_length, c.engine.page_size = "bfloat16", 128, 128, 64
    c.engine.row_sizes, c.engine.steps_per_dispatch, c.engine.refill_slots = (128, 256), 16, 8
    c.sampling.max_tokens = 96
    c.scheduler.prompts, c.scheduler.group_size = 16, 8

    c.optimizer.lr = (
        4e-6  # with 3e-4 the reward is 1 after three steps (gpu-check-first.json), and nothing is trained then
    )
    c.batch.rows, c.batch.tokens = 8, 1024

    c.data.train, c.data.size = "task:sums", 64
    c.reward.functions = (f"{HERE / 'rl_reward.py'}:digits",)
    c.eval.prompts, c.checkpoint.every, c.history.epochs = 0, 0, 2
    return c
