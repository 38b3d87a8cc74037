"""Supervised."""

from pathlib import Path

from jaxrl_post.config import default

HERE = Path(__file__).resolve().parent


def get_config():
    c = default()
    c.name, c.seed, c.steps = "demo_sft", 0, 5000
    c.model.preset, c.model.tokenizer = "demo", str(HERE / "demo_policy")

    c.engine.name = "demonstrations"
    c.engine.slots, c.engine.max_length, c.engine.page_size = 128, 116, 16
    c.engine.row_sizes = (128,)
    c.sampling.max_tokens = 96
    c.scheduler.prompts, c.scheduler.group_size = 84, 1

    c.algorithm.adv_estimator, c.algorithm.loss_mode = "ones", "sft"
    c.optimizer.lr, c.optimizer.schedule, c.optimizer.final_lr_ratio = 4e-3, "cosine", 0.02
    c.optimizer.warmup_steps, c.optimizer.b2, c.optimizer.weight_decay = 50, 0.98, 0.01
    c.batch.rows, c.batch.tokens, c.batch.head_chunk = 16, 144, 2304

    c.data.train, c.data.size = "task:sums", 8192
    c.data.task = {"more": 0.5, "tail": 0.12, "careful": 0.35, "luck": 0.15}
    c.eval.prompts, c.eval.every = 256, 1000
    return c
