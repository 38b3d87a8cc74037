"""Lengths of 818 completions of a real GRPO run, at 4 characters a token.

The run is SmolLM2-1.7B on Countdown (Brainkite/SmolLm2-zero, MIT).
The trace names no prompts, so rollouts of one prompt differ as much as rollouts of two prompts. So tail
batching's gain here is a lower bound for data in which some prompts are long. Qwen2.5-7B on 8 H200, analytic cost.
Needs JAXRL_DATA, a folder with rollout-samples/ (default ../shared/data).
Command: python -m jaxrl_post.simulate --config=configs/sim/grpo_countdown.py
"""

import os
from pathlib import Path

from jaxrl_post.simulate.settings import default

DATA = Path(os.environ.get("JAXRL_DATA", Path(__file__).resolve().parents[3] / "shared" / "data"))


def get_config():
    c = default()
    c.name, c.rounds = "grpo countdown", 20
    c.workload.name, c.workload.cap = "trace", 2048
    c.workload.path = str(DATA / "rollout-samples" / "smollm2_countdown_grpo_completions.txt")
    c.cluster.replicas, c.cluster.device, c.cluster.model = 8, "h200", "qwen2.5-7b"
    c.scheduler.prompts, c.scheduler.group_size = 64, 8
    # Why 1.25: RollPacker's own value (arXiv 2509.21009). Why recompute: no token is thrown away.
    c.scheduler.name, c.scheduler.over, c.scheduler.prefix_mode = "tail_batching", 1.25, "recompute"
    return c
