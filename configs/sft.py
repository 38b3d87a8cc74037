"""Supervised training of your own model on your own rows: configs/own.py without rewards.

A row has `prompt` and `completion`, or `messages`, as TRL's SFTTrainer takes them (docs/data_and_rewards.md, supervised rows).
As shipped, the demo's policy learns the ground truths of own/train.jsonl, which teaches little.
Recipe: next-token loss on the completions, AdamW at TRL's rate for supervised training.
Hardware: 2 CPU cores.
Command: python -m jaxrl_post.main --config=configs/sft.py --config.model.path=MODEL --config.data.train=ROWS.jsonl
Expected: actor/pg_loss falls, and the run ends by printing the run folder and its contents.
"""

from pathlib import Path

from jaxrl_post.config import default

HERE = Path(__file__).resolve().parent


def get_config():
    c = default()
    c.name, c.steps = "sft", 8
    c.model.path = str(HERE / "demo_policy")  # config.json, model.safetensors, tokenizer.json
    c.data.train = str(HERE / "own" / "train.jsonl")

    c.engine.name, c.algorithm.loss_mode, c.algorithm.adv_estimator = "demonstrations", "sft", "ones"
    c.engine.slots, c.engine.max_length, c.sampling.max_tokens = 16, 96, 64
    c.scheduler.prompts, c.scheduler.group_size = 16, 1
    c.optimizer.lr, c.batch.rows, c.batch.tokens = 2e-5, 4, 192
    c.eval.prompts, c.history.epochs = 0, 0
    return c
