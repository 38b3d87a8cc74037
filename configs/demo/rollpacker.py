"""The demo trained as RollPacker does: slow rollouts are dropped, slow prompts drawn again. It shows what that costs.

Recipe: that of configs/demo.py under RollPacker's tail batching (arXiv 2509.21009, section 4.1).
- A short round launches 80 prompts of 10 rollouts.
- It trains on the first 8 rollouts of the first 64 prompts and drops the rest.
- Every fifth round draws 64 of the slow prompts again.

Hardware: 2 CPU cores.
Command: python -m jaxrl_post.main --config=configs/demo/rollpacker.py
Expected: sched/num_tokens_discarded counts tokens that were generated and not trained on. Trained rollouts are shorter
than launched ones. configs/demo/tail_batching.py trains on all that it launches.
"""

from pathlib import Path

from jaxrl_post.config import load

CONFIGS = Path(__file__).resolve().parents[1]


def get_config():
    c = load(str(CONFIGS / "demo.py"))
    c.name = "demo_rollpacker"
    # Why 1.25 twice: the paper's own values, for prompts and for rollouts.
    c.scheduler.name, c.scheduler.over, c.scheduler.over_samples = "rollpacker", 1.25, 1.25
    return c
