"""Lengths uniform from 1 to 2,048 (PipelineRL, arXiv 2509.19128, appendix A) on 16 TPU v6e.

The devices' memory bounds the KV cache. Little can be gained, because many rollouts of every prompt are long.
Command: python -m jaxrl_post.simulate --config=configs/sim/uniform.py
"""

from jaxrl_post.simulate.settings import default


def get_config():
    c = default()
    c.name, c.rounds = "uniform", 20
    c.workload.name, c.workload.cap = "uniform", 2048
    c.cluster.replicas, c.cluster.device, c.cluster.model = 16, "v6e", "qwen2.5-7b"
    c.cluster.slots, c.cluster.bounded = 64, True
    c.scheduler.prompts, c.scheduler.group_size = 64, 8
    # Why 1.25: RollPacker's own value (arXiv 2509.21009). Why recompute: no token is thrown away.
    c.scheduler.name, c.scheduler.over, c.scheduler.prefix_mode = "tail_batching", 1.25, "recompute"
    return c
