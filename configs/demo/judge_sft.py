"""Supervised training of the judge of demo/judge.py from random weights, on verdicts over responses to sums.

Data: a question is a sum and a response to it, "47+8+5= 55+5=60#60". The verdict is 2 where the response is worked out,
1 where it is a guess, and 0 where it breaks off (data/tasks.py). It reads the form alone: right or wrong makes no difference.
Recipe: 80 steps of 64 verdicts, next-token loss on the verdict alone, AdamW, cosine schedule.
Hardware: 2 CPU cores.
Commands: python -m jaxrl_post.main --config=configs/demo/judge_sft.py --run-dir=runs/judge_sft
          cp runs/judge_sft/policy/* configs/judge_policy/
Expected: actor/pg_loss falls below 0.01. scripts/results/judge.json says how often the shipped judge is right.
"""

from pathlib import Path

from jaxrl_post.config import default

CONFIGS = Path(__file__).resolve().parents[1]


def get_config():
    c = default()
    c.name, c.steps = "judge_sft", 80
    c.model.preset, c.model.tokenizer = "demo", str(CONFIGS / "judge_policy")

    c.engine.name = "demonstrations"
    c.engine.slots, c.engine.max_length = 64, 128
    c.sampling.max_tokens = 16
    c.scheduler.prompts, c.scheduler.group_size = 64, 1

    c.algorithm.adv_estimator, c.algorithm.loss_mode = "ones", "sft"
    c.optimizer.lr, c.optimizer.schedule, c.optimizer.final_lr_ratio = 4e-3, "cosine", 0.02
    c.optimizer.warmup_steps, c.optimizer.b2, c.optimizer.weight_decay = 10, 0.98, 0.01
    c.batch.rows, c.batch.tokens, c.batch.head_chunk = 8, 512, 2048

    c.data.train, c.data.size = "task:verdicts", 4096
    c.eval.prompts = 0
    c.checkpoint.every = 0
    c.history.epochs = 0  # verdicts are written, not sampled: there is nothing to remember
    return c
