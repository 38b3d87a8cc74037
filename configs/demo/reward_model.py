"""A reward model on the demo's own preferences: a careful solution is chosen, a guess that forgets a term is rejected.

Pairs come from the split that made the demo's policy. The decoder begins as configs/demo_policy, and its new head as 0.
Hardware: 2 CPU cores.
Command: python -m jaxrl_post.main --config=configs/demo/reward_model.py --run-dir=runs/demo_reward_model
Expected: val/rewards/accuracy of 256 held-out pairs rises. Not measured yet.
"""

from pathlib import Path

from jaxrl_post.config import default

CONFIGS = Path(__file__).resolve().parents[1]


def get_config():
    c = default()
    c.name, c.steps = "demo_reward_model", 40
    c.model.path = str(CONFIGS / "demo_policy")

    c.engine.name = "preferences"
    c.engine.slots, c.engine.max_length, c.sampling.max_tokens = 128, 116, 96
    c.scheduler.prompts, c.scheduler.group_size = 32, 2

    c.algorithm.adv_estimator, c.algorithm.loss_mode = "pairs", "bradley_terry"
    c.algorithm.loss_agg_mode = "seq-mean-token-sum"
    c.algorithm.center_rewards_coefficient = 0.01
    c.optimizer.lr, c.optimizer.warmup_steps = 3e-4, 4
    c.batch.rows, c.batch.tokens = 8, 240

    c.data.train, c.data.size = "task:sums", 2048
    c.data.task = {"more": 0.5, "tail": 0.12}
    c.eval.prompts, c.eval.completions = 0, 256  # a reward model writes no tokens
    c.history.epochs = 0  # completions are written, not sampled: there is nothing to remember
    return c
