"""PPO as InstructGPT has it, on the demo's task and policy: a value model, and a KL in the reward with a target.

Recipe (arXiv 2203.02155, appendix C.4; arXiv 1909.08593, section 2.2):
- The critic starts from the supervised policy, also where the policy goes on from another run.
- The reward of every token is lowered by kl_coef times k1 of the KL to the reference. kl_coef moves towards kl_target.
- A round has two mini-batches and two passes over them. Values are clipped to 0.2 around those of the round's start.

Hardware: 2 CPU cores. Command: python -m jaxrl_post.main --config=configs/recipes/ppo.py
Expected: not measured yet. The demo's own figures are in scripts/results/demo.json.
"""

from pathlib import Path

from jaxrl_post.config import load

CONFIGS = Path(__file__).resolve().parents[1]


def get_config():
    c = load(str(CONFIGS / "demo/ppo.py"))
    c.name = "ppo"
    c.critic.path = str(CONFIGS / "demo_policy")
    c.algorithm.use_kl_in_reward, c.algorithm.kl_coef = True, 1e-3
    c.algorithm.kl_target, c.algorithm.kl_horizon = 0.1, 5000.0
    c.scheduler.mini_batches, c.scheduler.ppo_epochs = 2, 2
    c.eval.every = 20
    return c
