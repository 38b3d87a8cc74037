"""RollPacker's figure 11 (arXiv 2509.21009), Qwen2.5-7B with answers of at most 8k: synchronous rounds.

128 prompts x 8 answers on 16 H800; lengths, seconds a step and seconds a round as fitted to all 24 times of that figure.
Command: python -m jaxrl_post.simulate --config=configs/sim/rollpacker_8k_sync.py
Expected: 79 s of rollout, published 82.
"""

from jaxrl_post.sim.settings import default


def get_config():
    c = default()
    c.name, c.rounds = "rollpacker 8k sync", 20
    c.workload.name, c.workload.cap = "rollpacker", 8192
    c.cluster.replicas, c.cluster.slots = 16, 1024
    c.cluster.step_s, c.cluster.request_s, c.cluster.round_s = 8.0e-3, 4.0e-5, 14.0
    c.scheduler.prompts, c.scheduler.group_size = 128, 8
    c.published, c.fitted = {"rollout_s": 82.0}, ("rollout_s",)
    return c
