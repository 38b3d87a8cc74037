"""The GSM8K recipe with Qwen3-8B, Qwen3-32B or Qwen3-30B-A3B on a slice, and rollouts of up to 4,096 tokens with the prompt.

Recipe: that of configs/models/gsm8k_qwen2_5_7b.py, with longer rollouts. The engine sleeps while the learner works on v6e. On
v5p-64 and on hosts of eight H100 it has room to stay. The learner of the mixture divides its experts, and repeats the
routes that the engine recorded.
Hardware: FILE.py:8b-v6e-16 (without a choice too), :32b-v5p-64, :32b-4x8xh100, :30b-a3b-v5p-64, :30b-a3b-v6e-64 or
:30b-a3b-2x8xh100 (not run on one yet).
Needs files: as configs/models/gsm8k_qwen2_5_0_5b.py, with Qwen3-8B/, Qwen3-32B/ or Qwen3-30B-A3B/ in JAXRL_MODELS.
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
EXPERTS = {
    "algorithm.router_replay": True,
    "mesh.expert": 4,  # fsdp gathers a quarter of a layer's experts, and their rows travel
    "mesh.engine_expert": 1,
    "mesh.engine_tensor": 4,
}
MODELS = {"8b": "Qwen3-8B", "32b": "Qwen3-32B", "30b": "Qwen3-30B-A3B"}
SLICES = {
    "8b-v6e-16": {},
    "32b-v5p-64": LARGE,
    "30b-a3b-v5p-64": LARGE | EXPERTS | {"mesh.fsdp": 8},
    "30b-a3b-v6e-64": LARGE | EXPERTS | {"mesh.fsdp": 16, "batch.rows": 64, "engine.sleep": True},
    "30b-a3b-2x8xh100": LARGE | EXPERTS | {"mesh.fsdp": 4, "batch.rows": 16},
    "32b-4x8xh100": LARGE | {"mesh.engine_tensor": 8, "engine.slots": 64, "engine.row_sizes": (64, 128)},
}


def get_config(choice="8b-v6e-16"):
    c = load(str(CONFIGS / "models/gsm8k_qwen2_5_7b.py"))
    model = MODELS.get(choice.partition("-")[0], "Qwen3-8B")
    c.name = "gsm8k_" + model.lower().replace("-", "_")
    c.model.path = str(Path(c.model.path).with_name(model))
    c.engine.max_length, c.sampling.max_tokens, c.model.remat_policy = 4096, 3584, "full"
    return chosen(c, choice, SLICES)
