"""Supervised training on conversations of several turns, of which every assistant's turn is trained on.

The rows of own/conversations.jsonl are worked calculations with a calculator, under TRL's column `messages`. The chat
template of turns_policy marks what an assistant wrote by {% generation %}. What the tool said is shown and not trained on.

Hardware: 2 CPU cores. As shipped it trains the policy of the environments for 8 steps on 32 rows, which teaches little.
Command: python -m jaxrl_post.main --config=configs/demo/conversations_sft.py --run-dir=runs/conversations_sft
Expected: actor/pg_loss falls, and the run ends by printing the run folder and its contents.
"""

from pathlib import Path

from jaxrl_post.config import default

CONFIGS = Path(__file__).resolve().parents[1]


def get_config():
    c = default()
    c.name, c.steps = "conversations_sft", 8
    c.model.path = str(CONFIGS / "turns_policy")

    c.engine.name = "demonstrations"
    c.engine.slots, c.engine.max_length = 16, 96
    c.sampling.max_tokens = 64  # from the first token that is trained on to the last
    c.scheduler.prompts, c.scheduler.group_size = 16, 1

    c.algorithm.adv_estimator, c.algorithm.loss_mode = "ones", "sft"
    c.algorithm.neftune_alpha = 5.0
    c.optimizer.lr, c.batch.rows, c.batch.tokens = 1e-3, 4, 256

    c.data.train = str(CONFIGS / "own" / "conversations.jsonl")
    c.data.assistant_only_loss = True
    c.reward.functions = ("jaxrl_post.rewards.length:finished",)
    c.eval.prompts = 0
    c.history.epochs = 0  # conversations are written, not sampled: there is nothing to remember
    return c
