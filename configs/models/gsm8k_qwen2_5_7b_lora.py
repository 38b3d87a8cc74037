"""The GSM8K recipe with Qwen2.5-7B-Instruct and LoRA: the base stays in bfloat16, and 80 million numbers are trained.

Recipe: that of configs/models/gsm8k_qwen2_5_7b.py. Additions of rank 32 to all matrices have the scale alpha / sqrt(rank)
(rsLoRA, arXiv 2312.03732). Base and engine are in bfloat16, so the engine shares what has no additions where the layouts agree.
Moments and sums are those of the additions, so they stay in float32.
Hardware: FILE.py:v6e-8 (without a choice too), :8xh100 (not run on one yet).
Needs files: as configs/models/gsm8k_qwen2_5_7b.py.
Command: python -m jaxrl_post.main --config=configs/models/gsm8k_qwen2_5_7b_lora.py
Plan: python -m jaxrl_post.main --config=configs/models/gsm8k_qwen2_5_7b_lora.py:v6e-8 --dry-run --slice=v6e-8
Expected: no measured run yet.
"""

from pathlib import Path

from jaxrl_post.config import chosen, load

CONFIGS = Path(__file__).resolve().parents[1]
SLICES = {"v6e-8": {}, "8xh100": {"mesh.engine_tensor": 0, "engine.slots": 128, "engine.row_sizes": (128, 256)}}


def get_config(slice="v6e-8"):
    c = load(str(CONFIGS / "models/gsm8k_qwen2_5_7b.py"))
    c.name = "gsm8k_7b_lora"
    c.lora.rank, c.lora.alpha, c.lora.rslora, c.lora.base_dtype = 32, 32.0, True, "bfloat16"
    c.lora.targets = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
    c.optimizer.lr = 1e-4
    c.optimizer.moments_dtype, c.optimizer.sums_dtype, c.optimizer.b2 = "float32", "float32", 0.999
    c.mesh.fsdp, c.batch.rows, c.engine.sleep = 8, 8, False
    return chosen(c, slice, SLICES)
