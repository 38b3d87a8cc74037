"""The GSM8K recipe with gpt-oss-20b on one host of eight H100 or on a slice, and rollouts of up to 4,096 tokens.

Recipe: that of configs/models/gsm8k_qwen3.py. The learner divides the experts, and repeats the routes that the engine
recorded. The engine sleeps while the learner works, but on v5p-64 it has room to stay. The published MXFP4 weights are read
as bfloat16, and the policy is saved in bfloat16.
Hardware: FILE.py:8xh100 (without a choice too), :v6e-16, :v6e-64 or :v5p-64 (not run on one yet).
Needs files: as configs/models/gsm8k_qwen2_5_0_5b.py, with gpt-oss-20b/ in JAXRL_MODELS.
Command: python -m jaxrl_post.main --config=configs/models/gsm8k_gpt_oss.py
Plan: python -m jaxrl_post.main --config=configs/models/gsm8k_gpt_oss.py:v6e-16 --dry-run --slice=v6e-16
Expected: no measured run yet.
"""

from pathlib import Path

from jaxrl_post.config import chosen, load

CONFIGS = Path(__file__).resolve().parents[1]
EXPERTS = {
    "algorithm.router_replay": True,
    "mesh.expert": 4,  # fsdp gathers a part of each layer's experts, and their rows travel
    "mesh.engine_expert": 1,
    "mesh.engine_tensor": 4,
}
SLICES = {
    "8xh100": EXPERTS | {"mesh.fsdp": 2, "batch.rows": 8},
    "v6e-16": EXPERTS | {"mesh.expert": 2, "mesh.fsdp": 8},
    "v6e-64": EXPERTS | {"mesh.fsdp": 16, "batch.rows": 64},
    "v5p-64": EXPERTS | {"mesh.fsdp": 8, "batch.rows": 32, "engine.sleep": False},
}


def get_config(choice="8xh100"):
    c = load(str(CONFIGS / "models/gsm8k_qwen3.py"))
    c.name = "gsm8k_gpt_oss_20b"
    c.model.path = str(Path(c.model.path).with_name("gpt-oss-20b"))
    return chosen(c, choice, SLICES)
