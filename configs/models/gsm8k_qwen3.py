"""The GSM8K recipe with Qwen3-8B or Qwen3-32B on a slice, and rollouts of up to 4,096 tokens with the prompt.

Recipe: that of configs/models/gsm8k_qwen2_5_7b.py, with longer rollouts. The engine sleeps while the learner works on v6e-16. On
v5p-64 and on four hosts of eight H100 it has room to stay.
Hardware: FILE.py:8b-v6e-16 (without a choice too), :32b-v5p-64 or :32b-4x8xh100 (not run on one yet).
Needs files: as configs/models/gsm8k_qwen2_5_0_5b.py, with Qwen3-8B/ or Qwen3-32B/ in JAXRL_MODELS.
Command: python -m jaxrl_post.main --config=configs/models/gsm8k_qwen3.py
Plan: python -m jaxrl_post.main --config=configs/models/gsm8k_qwen3.py:32b-v5p-64 --dry-run --slice=v5p-64
Expected: no measured run yet.
"""

from pathlib import Path

from jaxrl_post.config import chosen, load

CONFIGS = Path(__file__).resolve().parents[1]
LARGE = {
    "model.remat_policy": "full",
    "mesh.fsdp": 32,
    "batch.rows": 32,
    "engine.sleep": False,
    "engine.slots": 32,
    "engine.row_sizes": (32, 64),
}
SLICES = {
    "8b-v6e-16": {},
    "32b-v5p-64": LARGE,
    "32b-4x8xh100": LARGE | {"mesh.engine_tensor": 8, "engine.slots": 64, "engine.row_sizes": (64, 128)},
}


def get_config(choice="8b-v6e-16"):
    c = load(str(CONFIGS / "models/gsm8k_qwen2_5_7b.py"))
    model = "Qwen3-32B" if choice.startswith("32b") else "Qwen3-8B"
    c.name = "gsm8k_" + model.lower().replace("-", "_")
    c.model.path = str(Path(c.model.path).with_name(model))
    c.engine.max_length, c.sampling.max_tokens, c.model.remat_policy = 4096, 3584, "full"
    return chosen(c, choice, SLICES)
