"""RollPacker's fitted rollouts of at most 8k tokens, without rounds: full slots first, then a split.

An optimizer step has 128 x 8 rollouts, on 16 H800 with Qwen2.5-7B. Seconds of generation come from the analytic cost.
Training takes 6 operations a weight and token, at 40 % of the peak. In the split, 10 devices generate and 6 train.
Command: python -m jaxrl_post.simulate --config=configs/sim/pipeline_8k.py
"""

from jaxrl_post.simulate.settings import default

# Why 10: the learner is the slower side: 26.3 s a step here, and 24.0 s with 5.
DEVICES, GENERATORS = 16, 10
TOKEN_S = 6 * 7.62e9 / (0.4 * 9.9e14)  # seconds that one device trains for one token


def get_config():
    c = default()
    c.name, c.rounds = "pipeline_8k", 20
    c.workload.name, c.workload.cap = "rollpacker", 8192
    # Why 192: the slots of PipelineRL's own case (arXiv 2509.19128, appendix A).
    c.cluster.replicas, c.cluster.slots = DEVICES, 192
    c.learner.token_s = TOKEN_S / DEVICES
    c.scheduler.prompts, c.scheduler.group_size = 128, 8
    # Why 4: modes.json finds this bound harmless.
    c.parts = (
        "full slots: scheduler.name=pipeline scheduler.max_staleness=4",
        f"split: learner.apart=True learner.token_s={TOKEN_S / (DEVICES - GENERATORS)} cluster.replicas={GENERATORS}",
    )
    return c
