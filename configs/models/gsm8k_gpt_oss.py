"""The GSM8K recipe with gpt-oss-20b on one host of eight H100 or on a slice of 16 v6e, and rollouts of up to 4,096 tokens.

Recipe: that of configs/models/gsm8k_qwen3.py. The learner repeats the routes that the engine recorded. The engine sleeps
while the learner works. The published MXFP4 weights are read as bfloat16, and the policy is saved in bfloat16.
Hardware: FILE.py:8xh100 (without a choice too) or :v6e-16 (not run on one yet).
Needs files: as configs/models/gsm8k_qwen2_5_0_5b.py, with gpt-oss-20b/ in JAXRL_MODELS.
Command: python -m jaxrl_post.main --config=configs/models/gsm8k_gpt_oss.py
Plan: python -m jaxrl_post.main --config=configs/models/gsm8k_gpt_oss.py:v6e-16 --dry-run --slice=v6e-16
Expected: no measured run yet.
"""

from pathlib import Path

from jaxrl_post.config import chosen, load

CONFIGS = Path(__file__).resolve().parents[1]
SLICES = {"8xh100": {"mesh.fsdp": 8, "batch.rows": 8, "mesh.engine_tensor": 4}, "v6e-16": {}}


def get_config(choice="8xh100"):
    c = load(str(CONFIGS / "models/gsm8k_qwen3.py"))
    c.name = "gsm8k_gpt_oss_20b"
    c.model.path = str(Path(c.model.path).with_name("gpt-oss-20b"))
    c.algorithm.router_replay = True
    return chosen(c, choice, SLICES)
