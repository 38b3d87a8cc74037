"""A planner of layouts on RollPacker's fitted lengths (arXiv 2509.21009), Qwen2.5-14B, rollouts of at most 32k tokens.

128 prompts x 8 rollouts on 32 H800, in synchronous rounds. Memory bounds the KV cache. The cost is analytic: the sums
of 48 layers over two devices add 0.96 ms to a step, and twice that over four devices.
Published: the gain of the paper's planner on the same model while its cap grew from 8k to 32k. Its planner reached a
tensor parallelism of 4. The trend is compared, not the setting.
Command: python -m jaxrl_post.simulate --config=configs/sim/planner_14b.py
Expected: four devices a replica from the second round on, and rounds 1.9 times as fast, within 25 %.
"""

from jaxrl_post.simulate.settings import default


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
