"""A planner of layouts on RollPacker's fitted lengths (arXiv 2509.21009), Qwen2.5-14B with rollouts of at most 32k
tokens.

Synchronous rounds of 128 prompts x 8 rollouts on 32 H800. Memory bounds the KV cache. The cost is analytic, with 0.96
ms a step for the sums over two devices of 48 layers, and twice that over four. The published figure is the
gain of that paper's planner on the same model while the length limit grew from 8k to 32k. Its tensor parallelism
reached 4. So the trend is compared, not the setting.
Command: python -m jaxrl_post.simulate --config=configs/sim/planner_14b.py
Expected: from the second round on four devices a replica, and rounds 1.9 times as fast within 25 %.
"""

from jaxrl_post.sim.settings import default


def get_config():
    c = default()
    c.name, c.rounds = "planner 14b", 12
    c.workload.name, c.workload.cap = "rollpacker", 32768
    c.cluster.replicas, c.cluster.model, c.cluster.bounded = 32, "qwen2.5-14b", True
    c.cluster.collective_s = 0.96e-3
    c.scheduler.prompts, c.scheduler.group_size = 128, 8
    c.parts = ("planner: cluster.layouts=[2,4] cluster.move_s=3.0",)
    c.published = {"speedup_over_sync": 1.9}
    return c
