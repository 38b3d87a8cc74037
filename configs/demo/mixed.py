"""The demo with two sources of prompts: sums and digits to be sorted, three sums for every sorting problem.

Recipe: that of configs/demo.py. grain mixes the sources by their weights, each in an order of its own.
The shipped policy was trained on sums alone. So its reward on sorting should stay near 0, which is not measured yet.
Hardware: 2 CPU cores.
Command: python -m jaxrl_post.main --config=configs/demo/mixed.py
Expected in metrics.jsonl: data/sums/share is 0.75 on average (python scripts/show.py curriculum). Evaluation reports each source by itself.
"""

from pathlib import Path

from jaxrl_post.config import load

CONFIGS = Path(__file__).resolve().parents[1]


def get_config():
    c = load(str(CONFIGS / "demo.py"))
    c.name = "demo_mixed"
    c.data.sources, c.data.weights = ("task:sums", "task:sorting"), (3.0, 1.0)
    return c
