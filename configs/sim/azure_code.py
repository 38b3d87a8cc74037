"""Lengths of Azure's code-completion trace of 2023 (8,819 requests; Splitwise, ISCA 2024, CC BY 4.0).

The trace names no prompts, so rollouts of one prompt differ as much as rollouts of two prompts. So tail
batching's gain here is a lower bound for data in which some prompts are long. Qwen2.5-7B on 8 H200, analytic cost.
Needs JAXRL_DATA, a folder with traces/ (default ../shared/data).
Command: python -m jaxrl_post.simulate --config=configs/sim/azure_code.py
"""

import os
from pathlib import Path

from jaxrl_post.simulate.settings import default

DATA = Path(os.environ.get("JAXRL_DATA", Path(__file__).resolve().parents[3] / "shared" / "data"))


def get_config():
    c = default()
    c.name, c.rounds = "azure code", 20
    c.workload.name, c.workload.path, c.workload.cap = (
        "trace",
        str(DATA / "traces" / "AzureLLMInferenceTrace_code.csv"),
        2048,
    )
    c.cluster.replicas, c.cluster.device, c.cluster.model = 8, "h200", "qwen2.5-7b"
    c.scheduler.prompts, c.scheduler.group_size = 64, 8
    # Why 1.25: RollPacker's own value (arXiv 2509.21009). Why recompute: no token is thrown away.
    c.scheduler.name, c.scheduler.over, c.scheduler.prefix_mode = "tail_batching", 1.25, "recompute"
    return c
