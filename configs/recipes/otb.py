"""OTB on the demo's task and policy: a baseline of its own for each token, with the least variance.

Recipe (verl's optimal_token_baseline): the rewards of a group are weighed by how far each rollout's tokens so far have
pushed the weights. It costs a forward pass for each round.
Hardware: 2 CPU cores. Command: python -m jaxrl_post.main --config=configs/recipes/otb.py
Expected: not measured yet. The demo's own figures are in scripts/results/demo.json.
"""

from pathlib import Path

from jaxrl_post.config import load

CONFIGS = Path(__file__).resolve().parents[1]


def get_config():
    c = load(str(CONFIGS / "demo.py"))
    c.name = "otb"
    c.algorithm.adv_estimator = "optimal_token_baseline"
    return c
