"""The demo as RollPacker trains it: slow answers are dropped and slow prompts drawn anew, to see what that costs.

Recipe: that of configs/demo.py under RollPacker's tail batching (arXiv 2509.21009, section 4.1): a short round launches 80
prompts of 10 answers, trains on the first 8 answers of the first 64 prompts and throws the rest away; every fifth round draws
64 of the prompts that were too slow once more.
Hardware: 2 CPU cores.
Command: python -m jaxrl_post.main --config=configs/demo_rollpacker.py
Expected: sched/num_tokens_discarded counts what is generated and not trained on; trained answers are shorter than launched
ones, where configs/demo_tail_batching.py trains on what it launches.
"""

from pathlib import Path

from jaxrl_post.config import load

HERE = Path(__file__).resolve().parent


def get_config():
    c = load(str(HERE / "demo.py"))
    c.name = "demo_rollpacker"
    c.scheduler.name, c.scheduler.over, c.scheduler.over_samples = "rollpacker", 1.25, 1.25
    return c
