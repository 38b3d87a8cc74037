"""The GSM8K recipe with Qwen2.5-7B-Instruct and LoRA on eight TPU v5e, with rollouts in int8.

Recipe: that of configs/models/gsm8k_qwen2_5_7b_lora.py. The engine has matrices, keys and values in int8, in four replicas of two
chips, and sleeps while the learner works. Importance weights correct for what that changes. Moments of the additions are in float32.
Training all weights takes more memory than these chips have, by their compiler, with moments and sums in bfloat16 too.
Hardware: v5e-8 (not run on one yet).
Needs files: as configs/models/gsm8k_qwen2_5_0_5b.py, with Qwen2.5-7B-Instruct/ in JAXRL_MODELS.
Command: python -m jaxrl_post.main --config=configs/models/gsm8k_qwen2_5_7b_int8.py
Plan: python -m jaxrl_post.main --config=configs/models/gsm8k_qwen2_5_7b_int8.py --dry-run --slice=v5e-8
Expected: no measured run yet.
"""

from pathlib import Path

from jaxrl_post.config import load

CONFIGS = Path(__file__).resolve().parents[1]


def get_config():
    c = load(str(CONFIGS / "models/gsm8k_qwen2_5_7b_lora.py"))
    c.name = "gsm8k_7b_int8"
    c.engine.weights, c.engine.kv, c.engine.page_size = "int8", "int8", 128
    c.algorithm.rollout_is = "token"
    c.mesh.engine_tensor, c.engine.sleep = 2, True
    return c
