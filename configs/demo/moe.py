"""The demo on a mixture of experts: eight experts of which a token uses two, with routes that the learner repeats.

Policy: configs/moe_policy, of the family Qwen3-MoE, made by configs/demo/moe_sft.py.
Recipe: that of configs/demo.py.
- The engine records the experts of every sampled token and layer. Old log-probs and the loss use them (R3, arXiv 2510.11370).
- A load-balance loss keeps the experts of a sequence in use (arXiv 2412.19437, eq. 17), and a z-loss its scores small.

Hardware: 2 CPU cores.
Command: python -m jaxrl_post.main --config=configs/demo/moe.py
Without replay: add --config.algorithm.router_replay=False. Pipelined: configs/demo/pipeline.py with
--config.model.path=configs/moe_policy.
Expected, on 256 held-out prompts at three seeds (scripts/results/demo-moe.json, checked by python scripts/show.py demo-moe):
- mean of 4 at temperature 1: from 0.29-0.33 to 0.78-0.79
- greedy: from 0.00-0.01 to 0.93-0.96
- training/router_mismatch: 0 in every step
- CPU seconds from a cold compilation cache: 148 to 169
"""

from pathlib import Path

from jaxrl_post.config import load

CONFIGS = Path(__file__).resolve().parents[1]


def get_config():
    c = load(str(CONFIGS / "demo.py"))
    c.name, c.steps = "demo_moe", 40
    c.eval.every, c.checkpoint.every = 20, 20
    c.model.path = str(CONFIGS / "moe_policy")
    # Why twice that of configs/demo.py: 40 steps then gain what 60 to 100 would.
    c.optimizer.lr = 5e-3
    c.algorithm.router_replay = True
    c.algorithm.router_aux_loss_coef, c.algorithm.router_z_loss_coef = 1e-3, 1e-4
    return c
