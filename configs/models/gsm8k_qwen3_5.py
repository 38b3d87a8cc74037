"""The GSM8K recipe with Qwen3.5-9B or Qwen3.5-35B-A3B on a slice, and rollouts of up to 4,096 tokens with the prompt.

Recipe: that of configs/models/gsm8k_qwen3.py, with its choice for a model of this kind. Three of four layers keep a state of 2 MiB
for each slot, and no pages.
Hardware: FILE.py:9b-v6e-16 (without a choice too), :9b-8xh100, :35b-a3b-v6e-64 or :35b-a3b-2x8xh100 (not run on one yet).
Needs files: as configs/models/gsm8k_qwen2_5_0_5b.py, with Qwen3.5-9B/ or Qwen3.5-35B-A3B/ in JAXRL_MODELS.
Command: python -m jaxrl_post.main --config=configs/models/gsm8k_qwen3_5.py
Plan: python -m jaxrl_post.main --config=configs/models/gsm8k_qwen3_5.py:9b-v6e-16 --dry-run --slice=v6e-16
Expected: no measured run yet.
"""

from pathlib import Path

from jaxrl_post.config import chosen, load

CONFIGS = Path(__file__).resolve().parents[1]
MODELS = {"9b": "Qwen3.5-9B", "35b": "Qwen3.5-35B-A3B"}
LIKE = {"35b-a3b-v6e-64": ":30b-a3b-v6e-64", "35b-a3b-2x8xh100": ":30b-a3b-2x8xh100"}  # choices of gsm8k_qwen3.py
SLICES = {"9b-v6e-16": {}, "9b-8xh100": {"mesh.fsdp": 8, "batch.rows": 8}} | {
    # Two heads of keys cannot be divided by four.
    name: {"mesh.engine_tensor": 2, "mesh.engine_expert": 2}
    for name in LIKE
}


def get_config(choice="9b-v6e-16"):
    c = load(str(CONFIGS / "models/gsm8k_qwen3.py") + LIKE.get(choice, ""))
    model = MODELS.get(choice.partition("-")[0], "Qwen3.5-9B")
    c.name = "gsm8k_" + model.lower().replace("-", "_").replace(".", "_")
    c.model.path = str(Path(c.model.path).with_name(model))
    return chosen(c, choice, SLICES)
