"""GRPO on GSM8K with Qwen2.5-0.5B-Instruct: the smallest published anchor.

Recipe: GRPO (arXiv 2402.03300), 128 prompts x 8 rollouts a step, on-policy, one update a step, 174 steps (3 epochs).
Prompt and rollout have at most 512 tokens each. Temperature 1, learning rate 1e-6, no KL term.
Prompts: verl's, the question with its suffix in the model's own chat template. Rollouts end with the end tokens of the
checkpoint: <|im_end|> and <|endoftext|> (generation_config.json and tokenizer_config.json).
Reward: verl's strict rule ("#### 72"). The flexible rule (the last number) is scored too, with weight 0. Gains by the
strict rule alone mostly come from the required form.
Papers: GSM8K, arXiv 2110.14168. Qwen2.5, arXiv 2412.15115.
Hardware: written for one accelerator with 80 GB (not run on one yet): bf16 activations and engine, float32 weights,
moments and gradient. FILE.py:t4, :l4 and :v5e-1 choose sizes for smaller ones.
Needs files, in the folders that two environment variables name:
- JAXRL_MODELS, a folder with Qwen2.5-0.5B-Instruct/ (default ../shared/models). It contains config.json,
  model.safetensors, tokenizer.json and tokenizer_config.json. --config.model.path=DIRECTORY replaces it.
- JAXRL_DATA, a folder with gsm8k/{train,test}.jsonl (default ../shared/data).

Command: python -m jaxrl_post.main --config=configs/models/gsm8k_qwen2_5_0_5b.py
Plan: python -m jaxrl_post.main --config=configs/models/gsm8k_qwen2_5_0_5b.py:t4 --dry-run --slice=t4
Anchors, not expectations (this config has no measured run yet):
- verl's docs/algo/baseline.md reports for this model: 49.6 before training, PPO 56.7, GRPO with LoRA (r 32) 54.3.
- 49.6 is a few-shot figure of the model's makers. The zero-shot strict score is lower: see the evaluation at step 0.
- verl's quick start: 256 prompts a step, lengths 512/512, actor learning rate 1e-6, KL coefficient 1e-3, 15 epochs,
  greedy single-sample validation, strict scorer.

Report greedy and mean@4 together with strict and flexible scores, tokens trained and device-hours.
"""

import os
from pathlib import Path

from jaxrl_post.config import chosen, default

SHARED = Path(__file__).resolve().parents[3] / "shared"
MODELS = Path(os.environ.get("JAXRL_MODELS", SHARED / "models"))
GSM8K = Path(os.environ.get("JAXRL_DATA", SHARED / "data")) / "gsm8k"

SMALL = {"engine.slots": 64, "engine.row_sizes": (64, 128), "batch.rows": 2}
SLICES = {"h100": {}, "l4": SMALL, "v5e-1": SMALL, "t4": SMALL | {"batch.rows": 1}}


def get_config(slice="h100"):
    c = default()
    c.name, c.steps = "gsm8k", 174
    c.model.path = str(MODELS / "Qwen2.5-0.5B-Instruct")
    c.model.compute_dtype, c.model.remat = "bfloat16", True

    c.engine.dtype, c.engine.slots, c.engine.max_length, c.engine.page_size = "bfloat16", 256, 1024, 64
    c.engine.row_sizes, c.engine.steps_per_dispatch, c.engine.refill_slots = (256, 512), 32, 8
    c.sampling.max_tokens = 512
    c.scheduler.prompts, c.scheduler.group_size = 128, 8

    c.optimizer.lr, c.optimizer.b2, c.optimizer.weight_decay = 1e-6, 0.999, 0.01
    c.batch.rows, c.batch.tokens, c.batch.head_chunk = 8, 1024, 1024

    c.data.train, c.eval.data = str(GSM8K / "train.jsonl"), str(GSM8K / "test.jsonl")
    c.data.format, c.data.columns, c.data.source = "trl", {"prompt": "question", "answer": "answer"}, "openai/gsm8k"
    c.data.template = '{prompt} Let\'s think step by step and output the final answer after "####".'
    c.data.chat = True
    c.reward.functions = ("jaxrl_post.rewards.math:strict", "jaxrl_post.rewards.math:flexible")
    c.reward.weights, c.reward.workers = (1.0, 0.0), 2

    c.eval.prompts, c.eval.samples, c.eval.every = 1319, 4, 29
    c.checkpoint.every, c.checkpoint.keep_last = 29, 2  # 12 bytes a weight, 6 GB each
    c.checkpoint.max_failures = 2

    # Tight alarms for a policy that is tuned already. Of 8 rollouts to a prompt, many groups are all right or all wrong.
    c.alarms.max_skipped, c.alarms.equal_rewards, c.alarms.max_mismatch = 2, 0.95, 0.02
    c.alarms.min_entropy, c.alarms.max_entropy = 0.02, 0.5
    c.alarms.shrinkage, c.alarms.growth, c.alarms.hacking = 0.3, 2.0, 0.6
    c.watchdog.dispatch_s, c.watchdog.train_s, c.watchdog.reward_s = 300.0, 600.0, 600.0
    c.watchdog.save_s, c.watchdog.evaluate_s, c.watchdog.compile_s = 900.0, 3600.0, 3600.0
    return chosen(c, slice, SLICES)
