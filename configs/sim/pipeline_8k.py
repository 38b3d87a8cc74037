"""RollPacker's fitted answers of at most 8k tokens without rounds: full slots first, then a learner on devices of its own.

128 x 8 answers an optimizer step on 16 H800 with Qwen2.5-7B, seconds from the analytic cost; training is taken at 40 % of the
peak, 6 operations a weight and token. Split, the 16 devices become 10 that generate and 6 that train.

Command: python -m jaxrl_post.simulate --config=configs/sim/pipeline_8k.py
"""

from jaxrl_post.sim.settings import default

DEVICES, GENERATORS = 16, 10
TOKEN_S = 6 * 7.62e9 / (0.4 * 9.9e14)  # of one device


def get_config():
    c = default()
    c.name, c.rounds = "pipeline_8k", 20
    c.workload.name, c.workload.cap = "rollpacker", 8192
    c.cluster.replicas, c.cluster.slots = DEVICES, 192
    c.learner.token_s = TOKEN_S / DEVICES
    c.scheduler.prompts, c.scheduler.group_size = 128, 8
    c.parts = (
        "full slots: scheduler.name=pipeline scheduler.max_staleness=4",
        f"split: learner.apart=True learner.token_s={TOKEN_S / (DEVICES - GENERATORS)} cluster.replicas={GENERATORS}",
    )
    return c
