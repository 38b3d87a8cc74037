"""PPO with a critic on the demo's task and policy: the demo's round, with values in the place of a group's mean.

Recipe (arXiv 1707.06347, with GAE, arXiv 1506.02438, lambda 0.95): the critic is a decoder of its own that starts from
the policy's weights, with a scalar head of zeros. It learns alone for 4 steps. Advantages are whitened over the round.
Groups of eight are kept only so that the demo's rounds are the same.
Optimizer: as in the demo, Adam's epsilon makes it gradient descent with momentum, for the critic too. Its learning rate
is larger, because its loss is smaller.
Hardware: 2 CPU cores. Command: python -m jaxrl_post.main --config=configs/demo/ppo.py
Expected: tests/test_main_critic_learns.py asks that 20 steps gain at least 80 % of what GRPO gains. Longer runs are not
measured yet. The demo's own figures are in scripts/results/demo.json.
"""

from pathlib import Path

from jaxrl_post.config import load

CONFIGS = Path(__file__).resolve().parents[1]


def get_config():
    c = load(str(CONFIGS / "demo.py"))
    c.name = "demo_ppo"
    c.algorithm.adv_estimator, c.algorithm.lam = "gae", 0.95
    c.critic.lr, c.critic.warmup_steps, c.critic.cliprange_value = 2e-2, 4, 0.2
    return c
