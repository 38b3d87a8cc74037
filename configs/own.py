"""Your own model, data and reward: copy this file and change its names and values.

It shows:
- a Hugging Face directory as the model
- JSONL rows in verl's columns, for training and for evaluation
- two reward functions of verl's four arguments with weights, one of them in a file of its own
- stop ids and stop strings

Hardware: 2 CPU cores. As shipped it trains the demo's policy for 3 steps on 16 rows, which teaches nothing.
Command: python -m jaxrl_post.main --config=configs/own.py
Expected: the run ends by printing the run folder and its contents.
"""

from pathlib import Path

from jaxrl_post.config import default

HERE = Path(__file__).resolve().parent


def get_config():
    c = default()
    c.name, c.steps = "own", 3
    c.model.path = str(HERE / "demo_policy")  # config.json, model.safetensors, tokenizer.json

    c.data.train, c.eval.data = str(HERE / "own" / "train.jsonl"), str(HERE / "own" / "held_out.jsonl")
    c.data.overlong = "drop"  # prompts that leave no room for a rollout; they are counted
    c.data.duplicates = "number"  # equal rows are prompts of their own
    c.reward.functions = (f"{HERE / 'own' / 'reward.py'}:score", "jaxrl_post.rewards.format:required")
    c.reward.weights, c.reward.workers, c.reward.timeout_s = (1.0, 0.1), 2, 5.0

    c.engine.slots, c.engine.max_length, c.engine.row_sizes = 16, 96, (64,)
    c.sampling.max_tokens, c.sampling.temperature = 64, 0.8
    c.sampling.stop_ids, c.sampling.stop_strings = (14,), ("##",)  # 14 is the tokenizer's <unk>
    c.scheduler.prompts, c.scheduler.group_size = 4, 4
    c.batch.rows, c.batch.tokens = 4, 192
    c.eval.prompts, c.eval.samples, c.eval.show = 4, 2, 4
    c.eval.temperature, c.eval.top_p = 0.8, 0.95
    return c
