"""The GSM8K recipe with Qwen3.5: 0.8B on one accelerator, 9B or 35B-A3B on a slice.

Recipe: that of configs/models/gsm8k_qwen2_5_0_5b.py for 0.8B, else of configs/models/gsm8k_qwen3.py, with rollouts of up to
4,096 tokens with the prompt. Three of four layers keep a state of 2 MiB for each slot (0.8B: 1 MiB), and no pages.
To fit: 35B-A3B on v6e-16 trains additions of rank 8 to all matrices but those of feed-forwards, on a base in bfloat16. Elsewhere
all weights are trained, with moments and gradient sums in bfloat16, but for 0.8B on one H100. The engine sleeps while the
learner works, but for 0.8B on an L4 or H100 and for 35B-A3B on v5p-64 and 2x8xh100.
Hardware: FILE.py:9b-v6e-16 (without a choice too), :9b-v5p-16, :9b-8xh100, :35b-a3b-v6e-16, :35b-a3b-v6e-64, :35b-a3b-v5p-64,
:35b-a3b-8xh100, :35b-a3b-2x8xh100, :0.8b-t4, :0.8b-l4, :0.8b-v5e-1 or :0.8b-h100 (not run on one yet).
Needs files: as configs/models/gsm8k_qwen2_5_0_5b.py, with Qwen3.5-0.8B/, Qwen3.5-9B/ or Qwen3.5-35B-A3B/ in JAXRL_MODELS.
Command: python -m jaxrl_post.main --config=configs/models/gsm8k_qwen3_5.py
Plan: python -m jaxrl_post.main --config=configs/models/gsm8k_qwen3_5.py:9b-v6e-16 --dry-run --slice=v6e-16
Expected: no measured run yet.
"""

from pathlib import Path

from jaxrl_post.config import chosen, load

CONFIGS = Path(__file__).resolve().parents[1]
MODELS = {"0.8b": "Qwen3.5-0.8B", "9b": "Qwen3.5-9B", "35b": "Qwen3.5-35B-A3B"}
# Two heads of keys cannot be divided by four.
FOUR = {"mesh.engine_tensor": 2, "mesh.engine_expert": 2}
ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")
LINEAR = ("in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a", "out_proj")
ADDITIONS = {
    "lora.rank": 8,
    "lora.targets": (*ATTENTION, *LINEAR),
    "lora.alpha": 16.0,
    "lora.base_dtype": "bfloat16",
    "optimizer.lr": 1e-4,
    "optimizer.moments_dtype": "float32",
    "optimizer.sums_dtype": "float32",
    "optimizer.b2": 0.999,
}
HALF = {"optimizer.moments_dtype": "bfloat16", "optimizer.sums_dtype": "bfloat16", "optimizer.b2": 0.98}
SLICES = {
    "9b-v6e-16": {},
    "9b-v5p-16": {"mesh.fsdp": 8, "batch.rows": 8},
    "9b-8xh100": {"mesh.fsdp": 8, "batch.rows": 8},
    "35b-a3b-v6e-16": FOUR | ADDITIONS | {"mesh.fsdp": 4, "batch.rows": 16, "mesh.engine_expert": 4},
    "35b-a3b-v6e-64": FOUR,
    "35b-a3b-v5p-64": FOUR,
    "35b-a3b-8xh100": FOUR | {"mesh.fsdp": 4, "mesh.expert": 2, "batch.rows": 8, "engine.sleep": True},
    "35b-a3b-2x8xh100": FOUR,
    "0.8b-t4": HALF | {"engine.sleep": True},
    "0.8b-l4": HALF,
    "0.8b-v5e-1": HALF | {"engine.sleep": True},
    "0.8b-h100": {},
}


def like(choice):
    """Returns the recipe that a choice begins with."""
    model, _, slice = choice.rpartition("b-")
    if model == "0.8":
        return f"gsm8k_qwen2_5_0_5b.py:{slice}"
    if model != "35b-a3":
        return "gsm8k_qwen3.py"
    near = {"v6e-16": "v6e-64", "8xh100": "2x8xh100"}
    return f"gsm8k_qwen3.py:30b-a3b-{near.get(slice, slice)}"


def get_config(choice="9b-v6e-16"):
    c = load(str(CONFIGS / "models" / like(choice if choice in SLICES else "9b-v6e-16")))
    model = MODELS.get(choice.partition("-")[0], MODELS["9b"])
    c.name = "gsm8k_" + model.lower().replace("-", "_").replace(".", "_")
    c.model.path = str(Path(c.model.path).with_name(model))
    return chosen(c, choice, SLICES)
