"""A mixture of experts on eight devices: data 2 x expert 4 in the learner, and four engine replicas of expert 2.

Task: that of configs/demo.py. Policy: random weights of `tiny_moe`, whose layers have eight experts, of which each token has
two. So it shows a layout and not a result: nothing is learned in so few steps.
Recipe: that of configs/demo.py, with the routers' two losses. The learner repeats the experts that the engine recorded (R3,
arXiv 2510.11370). `engine_expert` is half of `expert`, so weights change their layout when they come to the engine.
Hardware: any eight devices. On a CPU they are forced, which shows that the layout works, not that it is fast.
Command: XLA_FLAGS=--xla_force_host_platform_device_count=8 python -m jaxrl_post.main --config=configs/demo/experts.py
Expected: training/router_mismatch near 0, because engine and learner choose the same experts but for near ties.
"""

from pathlib import Path

from jaxrl_post.config import load

CONFIGS = Path(__file__).resolve().parents[1]


def get_config():
    c = load(str(CONFIGS / "demo.py"))
    c.name, c.steps = "demo_experts", 6
    c.model.path, c.model.preset, c.model.tokenizer = "", "tiny_moe", str(CONFIGS / "demo_policy")
    c.mesh.data, c.mesh.expert, c.mesh.engine_expert = 2, 4, 2
    c.algorithm.router_replay = True
    c.algorithm.router_aux_loss_coef, c.algorithm.router_z_loss_coef = 0.01, 0.001

    c.engine.slots, c.engine.row_sizes, c.engine.head_rows = 16, (64,), 32
    c.scheduler.prompts, c.scheduler.group_size, c.eval.prompts = 8, 4, 8
    return c
