"""Log-normal lengths: the mean is 1,350, and the longest of 8 rollouts is on average 1.43 times the mean.

The figures are those of Qwen3-8B (Applied Compute, July 2026). Half of the logarithm's variance is within a prompt.
4 replicas of 4 TPU v5e take steps independently of each other.
Command: python -m jaxrl_post.simulate --config=configs/sim/lognormal.py
"""

from jaxrl_post.simulate.settings import default


def get_config():
    c = default()
    c.name, c.rounds = "lognormal", 20
    c.workload.name, c.workload.cap = "lognormal", 16384
    c.workload.mean, c.workload.tail, c.workload.within = 1350.0, 1.43, 0.5
    c.cluster.replicas, c.cluster.tensor, c.cluster.device, c.cluster.model = 4, 4, "v5e", "qwen2.5-7b"
    c.cluster.pace = "independent"
    c.scheduler.prompts, c.scheduler.group_size = 64, 8
    # Why 1.25: RollPacker's own value (arXiv 2509.21009). Why recompute: no token is thrown away.
    c.scheduler.name, c.scheduler.over, c.scheduler.prefix_mode = "tail_batching", 1.25, "recompute"
    return c
