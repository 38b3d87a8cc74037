"""The GSM8K recipe with Qwen2.5-7B-Instruct on a slice of sixteen chips: the options that make its train step fit.

Recipe: that of configs/gsm8k_qwen2_5_0_5b.py, with fsdp 16 and an engine of four replicas of four chips. The engine sleeps
while the learner works. Layers are scanned, the head is split over the vocabulary, and outputs of attention are kept for
the backward pass. Moments and gradient sums are in bfloat16, so b2 is 0.98: with 0.999 a second moment would move by
less than its rounding.
Hardware: sixteen accelerators with 32 GB each, as v6e-16 (not run on one yet).
Needs files: as configs/gsm8k_qwen2_5_0_5b.py, with Qwen2.5-7B-Instruct/ in JAXRL_MODELS.
Command: python -m jaxrl_post.main --config=configs/gsm8k_qwen2_5_7b.py
Expected: no measured run yet.
"""

from pathlib import Path

from jaxrl_post.config import load

HERE = Path(__file__).resolve().parent


def get_config():
    c = load(str(HERE / "gsm8k_qwen2_5_0_5b.py"))
    c.name = "gsm8k_7b"
    c.model.path = str(Path(c.model.path).with_name("Qwen2.5-7B-Instruct"))
    c.mesh.fsdp, c.mesh.engine_tensor = 16, 4
    c.model.scan_layers, c.batch.split_head, c.model.remat_policy = "yes", "yes", "attention"
    c.optimizer.moments_dtype, c.optimizer.sums_dtype, c.optimizer.b2 = "bfloat16", "bfloat16", 0.98
    c.batch.rows, c.batch.tokens = 16, 4096

    c.engine.slots, c.engine.row_sizes, c.engine.sleep = 64, (64, 128), True
    return c
