"""A judged task: Qwen2.5-14B with rollouts of at most 16k tokens, and a judge of 7B, on 32 H800.

128 prompts x 8 rollouts in synchronous rounds. First half of the devices are reserved for the judge, and the policy trains and
generates on the others. Then both have all devices, and the judge works in slots that are free. At last tail batching is added.
Lengths are those fitted to RollPacker's figure 11 (arXiv 2509.21009). On all devices training takes 22/71 of the rollout phase, as
in the paper's profile of a judged task, and on half of them twice as long. Costs are analytic: the paper gives none of the judge.
Replies of 256 tokens are ours.
Command: python -m jaxrl_post.simulate --config=configs/sim/judge_14b.py
Expected: the seconds of each stage; no number of the paper is matched.
"""

from jaxrl_post.simulate.settings import default


def get_config():
    c = default()
    c.name, c.rounds = "judge 14b", 6
    c.workload.name, c.workload.cap = "rollpacker", 16384
    c.cluster.replicas, c.cluster.tensor, c.cluster.model = 8, 2, "qwen2.5-14b"
    c.learner.step_s = 60.0
    c.scheduler.prompts, c.scheduler.group_size = 128, 8
    c.judge.place, c.judge.replicas = "apart", 8
    c.judge.model, c.judge.question, c.judge.reply = "qwen2.5-7b", 768, 256.0
    c.parts = (
        "beside: judge.place=beside judge.replicas=1 cluster.replicas=16 learner.step_s=30",
        "tail batching: scheduler.name=tail_batching scheduler.over=1.25",
    )
    return c
