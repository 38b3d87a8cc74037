"""GRPO on conversations with a calculator: a small policy learns to ask it instead of guessing.

Task: problems such as "127*48+31=". In a turn the policy writes one operation, "127*48=", and is told the result, or
writes the result of the problem, "#6127". The reward is 1 for the right result and 0 for anything else.
Policy: configs/turns_policy, a Llama of 161,000 weights made by configs/demo/turns_sft.py. It asks in about a third of the
conversations, and guesses in the others.
Recipe: as demo.py, with 24 prompts x 8 conversations a step. A turn ends with the end token. Its slot is free until the
conversation goes on, 16 engine steps later (docs/environments.md).
Hardware: 2 CPU cores.
Command: python -m jaxrl_post.main --config=configs/demo/calculator.py
Expected: scripts/results/environments.json, checked by python scripts/show.py environments.
"""

from pathlib import Path

from jaxrl_post.config import default

CONFIGS = Path(__file__).resolve().parents[1]


def get_config():
    c = default()
    c.name, c.steps = "demo_calculator", 40
    c.model.path = str(CONFIGS / "turns_policy")

    c.environment.name, c.environment.arguments = "calculator", {"most_digits": 8}
    c.environment.max_turns, c.environment.max_s, c.environment.delay = 4, 120.0, 12
    c.environment.workers, c.environment.timeout_s = 2, 20.0

    c.engine.slots, c.engine.max_length, c.engine.page_size, c.engine.row_sizes = 64, 64, 16, (64, 128)
    c.engine.steps_per_dispatch, c.engine.refill_slots = 8, 8
    c.sampling.max_tokens = 48
    c.scheduler.prompts, c.scheduler.group_size = 24, 8

    c.optimizer.lr, c.optimizer.b1, c.optimizer.eps, c.optimizer.max_grad_norm = 1e-2, 0.9, 0.1, 0.0
    c.batch.rows, c.batch.tokens, c.batch.head_chunk = 16, 128, 2048

    c.data.train, c.data.size = "task:calculator", 2048
    c.eval.prompts = 64
    c.checkpoint.every, c.checkpoint.keep_last = 20, 3
    c.history.epochs = 2
    return c
