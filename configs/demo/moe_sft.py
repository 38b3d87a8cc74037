"""Supervised training of configs/moe_policy from random weights: the demo's solutions, and a policy with experts.

Data and recipe: those of configs/demo/sft.py, with fewer steps and a load-balance loss.
Hardware: 2 CPU cores.
Expected: the shipped policy's figures are those of "before" in scripts/results/demo-moe.json.
Commands: python -m jaxrl_post.main --config=configs/demo/moe_sft.py --run-dir=runs/moe_sft
          cp runs/moe_sft/policy/* configs/moe_policy/
"""

from pathlib import Path

from jaxrl_post.config import load

CONFIGS = Path(__file__).resolve().parents[1]


def get_config():
    c = load(str(CONFIGS / "demo" / "sft.py"))
    c.name, c.steps = "moe_sft", 3000
    c.model.preset = "demo_moe"
    c.algorithm.router_aux_loss_coef = 0.01
    return c
