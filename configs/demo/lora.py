"""The demo with LoRA: low-rank additions to all matrices of the layers are trained, and the shipped policy stays frozen.

Task, policy and rollouts are those of configs/demo.py. Only additions of rank 16 and their moments are trained and saved.
Their learning rate is another one: an addition moves its matrix by A A^T times what a step of the matrix itself would be.
Hardware: 2 CPU cores.
Command: python -m jaxrl_post.main --config=configs/demo/lora.py
Expected: at least 95 % of what configs/demo.py gains in its 100 steps (python scripts/show.py lora). RUN/adapter is for PEFT.
"""

from pathlib import Path

from jaxrl_post.config import load

CONFIGS = Path(__file__).resolve().parents[1]


def get_config():
    c = load(str(CONFIGS / "demo.py"))
    c.name = "demo_lora"
    c.lora.rank, c.lora.alpha = 16, 32.0
    c.optimizer.lr = 3e-2
    return c
