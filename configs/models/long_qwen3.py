"""The GSM8K recipe with Qwen3-8B or Qwen3-32B and rollouts of up to 65,536 or 131,072 tokens with the prompt.

Recipe: that of configs/models/gsm8k_qwen3.py. Neighbours along fsdp share packed rows (`mesh.context`), so that a device has a
part of each. The engine sleeps while the learner works, and both moments are bfloat16.
Hardware: FILE.py:8b-v5p-16 (without a choice too) or :8b-8xh100 for 65,536 tokens, :32b-v5p-128 or :32b-8x8xh100 for 131,072
(not run on one yet).
Needs files: as configs/models/gsm8k_qwen2_5_0_5b.py, with Qwen3-8B-128K/ or Qwen3-32B-128K/ in JAXRL_MODELS. They are the published
folders with `"rope_scaling": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}` and
`"max_position_embeddings": 131072` in config.json.
Command: python -m jaxrl_post.main --config=configs/models/long_qwen3.py
Plan: python -m jaxrl_post.main --config=configs/models/long_qwen3.py:32b-v5p-128 --dry-run --slice=v5p-128
Expected: no measured run yet.
"""

from pathlib import Path

from jaxrl_post.config import chosen, load

CONFIGS = Path(__file__).resolve().parents[1]
LARGE = {"mesh.fsdp": 64, "mesh.context": 16, "batch.rows": 4, "mesh.engine_tensor": 8, "engine.slots": 8}
SLICES = {"8b-v5p-16": {}, "8b-8xh100": {}, "32b-v5p-128": LARGE, "32b-8x8xh100": LARGE}


def get_config(choice="8b-v5p-16"):
    c = load(str(CONFIGS / "models/gsm8k_qwen3.py"))
    model, length = ("Qwen3-32B-128K", 131_072) if choice.startswith("32b") else ("Qwen3-8B-128K", 65_536)
    c.name = "long_" + model.lower().replace("-", "_")
    c.model.path = str(Path(c.model.path).with_name(model))
    c.engine.max_length, c.sampling.max_tokens, c.batch.tokens = length, length - 1024, length
    c.mesh.fsdp, c.mesh.context, c.batch.rows = 8, 8, 1
    c.mesh.engine_tensor, c.engine.slots, c.engine.row_sizes = 4, 16, (32, 64)  # pages for whole rollouts in every slot
    c.model.remat_policy = "attention"  # which is most of a long row's work
    c.engine.sleep, c.optimizer.moments_dtype, c.optimizer.b2 = True, "bfloat16", 0.99
    return chosen(c, choice, SLICES)
