"""Supervised training of the demo's policy from random weights, on worked solutions of the demo's own task.

Data: a solution is careful with probability 0.35, and else a guess. A guess is right with probability 0.15, and else
forgets a term. The kind of solution does not depend on the problem. Long problems are more frequent than in the demo,
so that careful solutions stay right where they are long. Problems come from a split that the demo uses neither for
training nor for held-out prompts (data/tasks.py).
Recipe: 5,000 steps of 84 solutions, next-token loss on the solution alone, AdamW, cosine schedule.
Hardware: 2 CPU cores.
Commands: python -m jaxrl_post.main --config=configs/demo/sft.py --run-dir=runs/demo_sft
          cp runs/demo_sft/policy/* configs/demo_policy/
Expected, on the demo's kind of held-out prompts: mean of 4 at temperature 1 from 0.34 to 0.37, greedy from 0.00 to
0.01. The shipped policy's figures are those of "before" in scripts/results/demo.json.
"""

from pathlib import Path

from jaxrl_post.config import default

CONFIGS = Path(__file__).resolve().parents[1]


def get_config():
    c = default()
    c.name, c.steps = "demo_sft", 5000
    c.model.preset, c.model.tokenizer = "demo", str(CONFIGS / "demo_policy")

    c.engine.name = "demonstrations"
    c.engine.slots, c.engine.max_length, c.engine.page_size, c.engine.row_sizes = 128, 116, 16, (128,)
    c.sampling.max_tokens = 96
    c.scheduler.prompts, c.scheduler.group_size = 84, 1

    c.algorithm.adv_estimator, c.algorithm.loss_mode = "ones", "sft"
    c.optimizer.lr, c.optimizer.schedule, c.optimizer.final_lr_ratio = 4e-3, "cosine", 0.02
    c.optimizer.warmup_steps, c.optimizer.b2, c.optimizer.weight_decay = 50, 0.98, 0.01
    c.batch.rows, c.batch.tokens, c.batch.head_chunk = 16, 144, 2304

    c.data.train, c.data.size = "task:sums", 8192
    c.data.task = {"more": 0.5, "tail": 0.12, "careful": 0.35, "luck": 0.15}
    c.eval.task = {"more": 0.35, "tail": 0.05}
    c.eval.prompts, c.eval.completions, c.eval.every = 256, 256, 1000
    c.history.epochs = 0  # solutions are written, not sampled: there is nothing to remember
    return c
