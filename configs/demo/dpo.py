"""DPO on preferences of the demo's own task: a careful solution is chosen, a guess that forgets a term is rejected.

Pairs come from the split that made the demo's policy. The policy and the reference begin as configs/demo_policy.
Hardware: 2 CPU cores.
Command: python -m jaxrl_post.main --config=configs/demo/dpo.py --run-dir=runs/demo_dpo
Expected, on 256 held-out problems (one seed, 24 CPU seconds):
- val/rewards/accuracies: from 0, where all rewards are equal, to 1.00; val/rewards/margins: to 3.6
- mean reward of 4 rollouts at temperature 1: from 0.37 to 0.69; greedy: from 0.01 to 0.89, because guesses become rare
"""

from pathlib import Path

from jaxrl_post.config import default

CONFIGS = Path(__file__).resolve().parents[1]


def get_config():
    c = default()
    c.name, c.steps = "demo_dpo", 40
    c.model.path = str(CONFIGS / "demo_policy")

    c.engine.name = "preferences"
    c.engine.slots, c.engine.max_length, c.engine.page_size, c.engine.row_sizes = 128, 116, 16, (128,)
    c.sampling.max_tokens = 96
    c.scheduler.prompts, c.scheduler.group_size = 32, 2

    c.algorithm.adv_estimator, c.algorithm.loss_mode = "pairs", "dpo"
    c.algorithm.loss_agg_mode = "seq-mean-token-sum"
    c.algorithm.dpo_beta, c.algorithm.label_smoothing = 0.2, 0.05
    c.optimizer.lr, c.optimizer.warmup_steps = 3e-4, 4
    c.batch.rows, c.batch.tokens, c.batch.head_chunk = 8, 240, 1920

    c.data.train, c.data.size = "task:sums", 2048
    c.data.task = {"more": 0.5, "tail": 0.12}
    c.eval.task = {"more": 0.35, "tail": 0.05}
    c.eval.prompts, c.eval.completions, c.eval.every = 256, 256, 20
    c.history.epochs = 0  # completions are written, not sampled: there is nothing to remember
    return c
