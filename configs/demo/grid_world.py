"""GRPO on a grid world as text: a small policy learns to walk to the goal instead of wandering.

Task: the policy is told "12,40": it is at x=1, y=2 of a grid of 5 x 5, and the goal is at x=4, y=0. In a turn it writes u, d,
l or r. The reward is 1 at the goal. After 8 turns the conversation ends.
Policy: configs/turns_policy, as in configs/demo/calculator.py. A third of its steps are right ones, and the others random.
Hardware: 2 CPU cores.
Command: python -m jaxrl_post.main --config=configs/demo/grid_world.py
Expected: scripts/results/environments.json, checked by python scripts/show.py environments.
"""

from pathlib import Path

from jaxrl_post.config import default

CONFIGS = Path(__file__).resolve().parents[1]


def get_config():
    c = default()
    c.name, c.steps = "demo_grid_world", 40
    c.model.path = str(CONFIGS / "turns_policy")

    c.environment.name, c.environment.delay = "grid_world", 8

    c.engine.slots, c.engine.max_length, c.engine.page_size, c.engine.row_sizes = 64, 80, 16, (64, 128)
    c.engine.steps_per_dispatch, c.engine.refill_slots = 4, 8
    c.sampling.max_tokens = 72
    c.scheduler.prompts, c.scheduler.group_size = 12, 8

    c.optimizer.lr = 1e-3
    c.batch.rows, c.batch.tokens, c.batch.head_chunk = 16, 128, 2048

    c.data.train, c.data.size = "task:grid_world", 100
    c.eval.prompts = 40
    c.checkpoint.every = 0
    c.history.epochs = 2
    return c
