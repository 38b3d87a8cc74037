"""GRPO on MBPP with Qwen2.5-Coder-1.5B-Instruct: programs judged by their tests, within RollPacker's limit of CPU seconds.

Recipe: GRPO (arXiv 2402.03300), 64 prompts x 8 answers a step, pipelined with a staleness of at most 2 optimizer steps, learning
rate 1e-6. Reward 1 when the last block of code passes all tests of the task (rewards/code.py). A test is cut off at 1.5 times what
the slowest right program took so far, at least 2 and at most 30 CPU seconds (RollPacker, arXiv 2509.21009, section 5.2): a right
answer that is far slower than those before it is judged wrong, and the run repeats itself from its journal only. With
adaptive_limit off every test has test_limit_s. Programs run in killable processes with bounds, not in a sandbox.
Data: MBPP (arXiv 2108.07732), tasks in file order; the last 100 rows are a file of yours for evaluation, or eval.prompts=0.
Hardware: written for one accelerator with 80 GB (not run on one yet).
Needs: JAXRL_MODELS, a folder with Qwen2.5-Coder-1.5B-Instruct/ in it (default ../shared/models); JAXRL_DATA, a folder with
mbpp/mbpp.jsonl in it (default ../shared/data).
Command: python -m jaxrl_post.main --config=configs/mbpp_qwen2_5_coder.py
"""

import os
from pathlib import Path

from jaxrl_post.config import default

SHARED = Path(__file__).resolve().parents[2] / "shared"
MODELS = Path(os.environ.get("JAXRL_MODELS", SHARED / "models"))
MBPP = Path(os.environ.get("JAXRL_DATA", SHARED / "data")) / "mbpp"


def get_config():
    c = default()
    c.name, c.steps = "mbpp", 100
    c.model.path = str(MODELS / "Qwen2.5-Coder-1.5B-Instruct")
    c.model.compute_dtype, c.model.remat = "bfloat16", True

    c.engine.dtype, c.engine.slots, c.engine.max_length, c.engine.page_size = "bfloat16", 256, 1024, 64
    c.engine.row_sizes, c.engine.steps_per_dispatch, c.engine.refill_slots = (256, 512), 16, 8
    c.sampling.max_tokens = 640
    c.scheduler.prompts, c.scheduler.group_size = 64, 8
    c.scheduler.name, c.scheduler.max_staleness, c.scheduler.ahead = "pipeline", 2, 16
    c.algorithm.prox_logp_method, c.algorithm.rollout_is = "loglinear", "token"

    c.optimizer.lr, c.optimizer.b2, c.optimizer.weight_decay = 1e-6, 0.999, 0.01
    c.batch.rows, c.batch.tokens, c.batch.head_chunk = 8, 1024, 1024

    c.data.train = str(MBPP / "mbpp.jsonl")
    c.data.format, c.data.columns, c.data.source = "trl", {"prompt": "text", "id": "task_id"}, "google-research/mbpp"
    c.data.template = "{prompt}\nAnswer with one block of Python code."
    c.data.chat = True
    c.reward.functions, c.reward.workers = ("jaxrl_post.rewards.code:tests",), 8
    c.reward.adaptive_limit, c.reward.test_limit_s, c.reward.timeout_s = True, 10.0, 120.0

    c.eval.prompts = 0
    return c
