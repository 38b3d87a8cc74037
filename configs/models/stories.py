"""GRPO on stories260K: a pretrained model (llama2.c, 260K parameters) learns to put a given word into its stories.

Recipe: GRPO (arXiv 2402.03300), 8 openings x 8 rollouts a step, on-policy, one update a step, 100 steps. The reward is
1 when the 64 tokens after the opening contain "happy", else 0. Temperature 1, no KL term.
Hardware: 2 CPU cores.
Needs the weights: JAXRL_DATA, a folder with tinystories-260k/ (default ../shared/data).
Command: python -m jaxrl_post.main --config=configs/models/stories.py
Expected: see scripts/results/stories.json, written by scripts/show.py stories.
"""

import os
from pathlib import Path

from jaxrl_post.config import default

DATA = Path(os.environ.get("JAXRL_DATA", Path(__file__).resolve().parents[3] / "shared" / "data"))


def get_config():
    c = default()
    c.name, c.steps = "stories", 100
    c.model.path = str(DATA / "tinystories-260k" / "stories260K.bin")
    c.model.tokenizer = str(DATA / "tinystories-260k" / "tok512.bin")

    c.engine.slots, c.engine.max_length, c.engine.page_size, c.engine.row_sizes = 64, 128, 64, (64, 128)
    c.sampling.max_tokens = 64
    c.scheduler.prompts, c.scheduler.group_size = 8, 8

    c.optimizer.lr = 1e-4
    c.batch.rows, c.batch.tokens, c.batch.head_chunk = 16, 192, 3072

    c.data.train, c.data.size = "task:openings", 256
    c.data.task = {"word": "happy"}
    c.reward.functions = ("jaxrl_post.rewards.format:required",)

    c.eval.prompts, c.eval.samples, c.eval.show = 64, 4, 3
    c.eval.at = (*range(1, 10), *range(90, 100))
    return c
