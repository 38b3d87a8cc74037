"""RollPacker's own tail batching (arXiv 2509.21009), Qwen2.5-32B with rollouts of at most 32k tokens.

128 prompts x 8 rollouts, with 1.25 times as many of both launched, on 32 replicas of 64 H800.
Fitted: lengths, seconds a step and seconds a round, to all 24 times of the paper's figure 11. 170 s is one of them.
Training takes 23/72 of a synchronous rollout phase, as in the paper's profile (section 2). Nothing else is fitted.
Command: python -m jaxrl_post.simulate --config=configs/sim/rollpacker_32k.py
Expected: rollout_s within 15 %, the period exactly 5, and rollouts about a third shorter than the policy gives.
Short and long steps come out shorter than the published ones, which include rewards.
"""

from jaxrl_post.simulate.settings import default


def get_config():
    c = default()
    c.name, c.rounds = "rollpacker 32k", 20
    c.workload.name, c.workload.cap = "rollpacker", 32768
    c.cluster.replicas, c.cluster.tensor = 32, 2
    c.cluster.step_s, c.cluster.request_s, c.cluster.round_s = 0.0195, 4e-05, 28.0
    c.learner.step_s = 673.0 * 23 / 72
    c.scheduler.prompts, c.scheduler.group_size = 128, 8
    # Why 1.25 twice: the paper's own values, for prompts and for rollouts.
    c.scheduler.name, c.scheduler.over, c.scheduler.over_samples = "rollpacker", 1.25, 1.25
    c.published = {
        "rollout_s": 170.0,
        "short_step_s": 261.0,
        "long_step_s": 771.0,
        "speedup_over_sync": 2.21,
        "period": 5.0,
    }
    c.fitted = ("rollout_s",)
    return c
