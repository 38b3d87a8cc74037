"""Supervised training of the policy of demo/calculator.py and demo/grid_world.py from random weights, on turns of conversations.

Data: a row is one turn of a worked conversation (data/turn_tasks.py). Its first turn of a calculation calls the calculator
with probability 0.35, and else guesses a result, which is wrong. A step in the grid is right with probability 0.35, and
else random. Problems come from a split that is used neither for training nor for held-out prompts.
Recipe: 1,200 steps of 64 turns, next-token loss on the turn alone, AdamW, cosine schedule.
Hardware: 2 CPU cores.
Commands: python -m jaxrl_post.main --config=configs/demo/turns_sft.py --run-dir=runs/turns_sft
          cp runs/turns_sft/policy/* configs/turns_policy/
Expected: the shipped policy's figures are those of "before" in scripts/results/environments.json.
"""

from pathlib import Path

from jaxrl_post.config import default

CONFIGS = Path(__file__).resolve().parents[1]


def get_config():
    c = default()
    c.name, c.steps = "turns_sft", 1200
    c.model.preset, c.model.tokenizer = "demo", str(CONFIGS / "turns_policy")

    c.engine.name = "demonstrations"
    c.engine.slots, c.engine.max_length = 64, 96
    c.sampling.max_tokens = 16
    c.scheduler.prompts, c.scheduler.group_size = 64, 1

    c.algorithm.adv_estimator, c.algorithm.loss_mode = "ones", "sft"
    c.optimizer.lr, c.optimizer.schedule, c.optimizer.final_lr_ratio = 4e-3, "cosine", 0.02
    c.optimizer.warmup_steps, c.optimizer.b2, c.optimizer.weight_decay = 50, 0.98, 0.01
    c.batch.rows, c.batch.tokens, c.batch.head_chunk = 4, 512, 2048

    c.data.train, c.data.size = "task:turns", 16384
    c.data.task = {"careful": 0.35}
    c.eval.prompts = 0
    c.checkpoint.every = 0
    c.history.epochs = 0  # turns are written, not sampled: there is nothing to remember
    return c
