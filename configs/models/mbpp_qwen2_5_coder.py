"""GRPO on MBPP with Qwen2.5-Coder-1.5B-Instruct: programs judged by tests, within RollPacker's limit of CPU seconds.

Recipe: GRPO (arXiv 2402.03300), 64 prompts x 8 rollouts a step, learning rate 1e-6. It is pipelined with a staleness
of at most 2 optimizer steps. Sizes are those of configs/models/gsm8k_qwen2_5_0_5b.py.
Reward: 1 when the last block of code passes all tests of the task (rewards/code.py). Programs run in a
sandbox (rewards/sandbox), apart from the tests.
Limit (RollPacker, arXiv 2509.21009): 1.5 times the CPU seconds of the slowest right program of the prompt so far, at
least 2 and at most 30. So a right program that is far slower than earlier ones is judged wrong. A run with this limit
can be repeated only from its journal. With adaptive_limit off every test has test_limit_s.
Data: MBPP (arXiv 2108.07732), all of its 974 rows. Tasks 11 to 510 are the test split, so this config gives no
held-out figure. For one, give data.train the rows of the training split, eval.data the rows of the test split, and
eval.prompts their number.
Hardware: written for one accelerator with 80 GB (not run on one yet).
Needs files, in the folders that two environment variables name:
- JAXRL_MODELS, a folder with Qwen2.5-Coder-1.5B-Instruct/ (default ../shared/models).
- JAXRL_DATA, a folder with mbpp/mbpp.jsonl (default ../shared/data).

Command: python -m jaxrl_post.main --config=configs/models/mbpp_qwen2_5_coder.py
"""

import os
from pathlib import Path

from jaxrl_post.config import load

CONFIGS = Path(__file__).resolve().parents[1]
SHARED = CONFIGS.parents[1] / "shared"
MODELS = Path(os.environ.get("JAXRL_MODELS", SHARED / "models"))
MBPP = Path(os.environ.get("JAXRL_DATA", SHARED / "data")) / "mbpp"


def get_config():
    c = load(str(CONFIGS / "models/gsm8k_qwen2_5_0_5b.py"))
    c.name, c.steps = "mbpp", 100
    c.model.path = str(MODELS / "Qwen2.5-Coder-1.5B-Instruct")
    c.engine.prompt_rows = 1024
    c.sampling.max_tokens = 640
    c.scheduler.prompts = 64
    c.scheduler.name, c.scheduler.max_staleness, c.scheduler.ahead = "pipeline", 2, 16
    c.algorithm.prox_logp_method, c.algorithm.rollout_is = "loglinear", "token"

    c.data.train, c.eval.data = str(MBPP / "mbpp.jsonl"), ""
    c.eval.prompts = c.eval.every = 0
    c.watchdog.evaluate_s = 14400.0  # its default, as nothing is evaluated
    c.data.columns, c.data.source = {"prompt": "text", "id": "task_id"}, "google-research/mbpp"
    c.data.template = "{prompt}\nAnswer with one block of Python code."
    c.reward.functions, c.reward.weights, c.reward.workers = ("jaxrl_post.rewards.code:tests",), (), 8
    c.reward.adaptive_limit, c.reward.timeout_s = True, 120.0
    return c
