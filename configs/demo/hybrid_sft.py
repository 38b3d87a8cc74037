"""Supervised training of configs/hybrid_policy from random weights: the demo's solutions, and a policy with recurrent states.

Data and recipe: those of configs/demo/sft.py, with fewer steps.
Hardware: 2 CPU cores.
Expected: no figures are recorded yet; python scripts/show.py demo-hybrid records those of the shipped policy as "before".
Commands: python -m jaxrl_post.main --config=configs/demo/hybrid_sft.py --run-dir=runs/hybrid_sft
          cp runs/hybrid_sft/policy/* configs/hybrid_policy/
"""

from pathlib import Path

from jaxrl_post.config import load

CONFIGS = Path(__file__).resolve().parents[1]


def get_config():
    c = load(str(CONFIGS / "demo" / "sft.py"))
    c.name, c.steps = "hybrid_sft", 2000
    c.model.preset = "demo_hybrid"
    return c
