"""RollPacker's own tail batching (arXiv 2509.21009), Qwen2.5-7B with rollouts of at most 8k tokens.

128 prompts x 8 rollouts, with 1.25 times as many of both launched, on 16 replicas of 16 H800.
Fitted: lengths, seconds a step and seconds a round, to all 24 times of the paper's figure 11. 47 s is one of them.
Training takes 23/72 of a synchronous rollout phase, as in the paper's profile (section 2). Nothing else is fitted.
Command: python -m jaxrl_post.simulate --config=configs/sim/rollpacker_8k.py
Expected: rollout_s within 15 %, the period exactly 5, and rollouts about a third shorter than the policy gives.
Short and long steps come out shorter than the published ones, which include rewards.
"""

from jaxrl_post.simulate.settings import default


def get_config():
    c = default()
    c.name, c.rounds = "rollpacker 8k", 20
    c.workload.name, c.workload.cap = "rollpacker", 8192
    c.cluster.replicas = 16
    c.cluster.step_s, c.cluster.request_s, c.cluster.round_s = 0.008, 4e-05, 14.0
    c.learner.step_s = 82.0 * 23 / 72
    c.scheduler.prompts, c.scheduler.group_size = 128, 8
    # Why 1.25 twice: the paper's own values, for prompts and for rollouts.
    c.scheduler.name, c.scheduler.over, c.scheduler.over_samples = "rollpacker", 1.25, 1.25
    c.published = {
        "rollout_s": 47.0,
        "short_step_s": 106.0,
        "long_step_s": 129.0,
        "speedup_over_sync": 1.3,
        "period": 5.0,
    }
    c.fitted = ("rollout_s",)
    return c
