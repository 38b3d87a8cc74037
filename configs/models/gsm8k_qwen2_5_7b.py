"""The GSM8K recipe with Qwen2.5-7B-Instruct on a slice: the options that make its train step fit.

Recipe: that of configs/models/gsm8k_qwen2_5_0_5b.py, with fsdp over all devices. On TPUs the engine has four replicas of four
chips and sleeps while the learner works. Moments and gradient sums are then in bfloat16, so b2 is 0.98: with 0.999 a
second moment would move by less than its rounding. On eight H100 every GPU is a replica, and nothing sleeps.
Hardware: FILE.py:v6e-16 (without a choice too), :v5e-16 or :8xh100 (not run on one yet).
Needs files: as configs/models/gsm8k_qwen2_5_0_5b.py, with Qwen2.5-7B-Instruct/ in JAXRL_MODELS.
Command: python -m jaxrl_post.main --config=configs/models/gsm8k_qwen2_5_7b.py
Plan: python -m jaxrl_post.main --config=configs/models/gsm8k_qwen2_5_7b.py:v5e-16 --dry-run --slice=v5e-16
Expected: no measured run yet.
"""

from pathlib import Path

from jaxrl_post.config import chosen, load

CONFIGS = Path(__file__).resolve().parents[1]
H100 = {
    "mesh.fsdp": 8,
    "mesh.engine_tensor": 0,
    "engine.sleep": False,
    "optimizer.moments_dtype": "float32",
    "optimizer.sums_dtype": "float32",
    "optimizer.b2": 0.999,
    "batch.rows": 8,
    "engine.slots": 128,
    "engine.row_sizes": (128, 256),
}
SLICES = {"v6e-16": {}, "v5e-16": {"model.remat_policy": "full"}, "8xh100": H100}


def get_config(slice="v6e-16"):
    c = load(str(CONFIGS / "models/gsm8k_qwen2_5_0_5b.py"))
    c.name = "gsm8k_7b"
    c.model.path = str(Path(c.model.path).with_name("Qwen2.5-7B-Instruct"))
    c.mesh.fsdp, c.mesh.engine_tensor = 16, 4
    c.model.scan_layers, c.batch.split_head, c.model.remat_policy = "yes", "yes", "attention"
    c.optimizer.moments_dtype, c.optimizer.sums_dtype, c.optimizer.b2 = "bfloat16", "bfloat16", 0.98
    c.batch.rows, c.batch.tokens = 16, 4096

    c.engine.slots, c.engine.row_sizes, c.engine.sleep = 64, (64, 128), True
    return chosen(c, slice, SLICES)
