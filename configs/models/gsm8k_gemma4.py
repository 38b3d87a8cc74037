"""The GSM8K recipe with Gemma 4: E2B on a free Colab, E4B on one accelerator, 31B on a slice.

Recipe: that of configs/models/gsm8k_qwen2_5_0_5b.py for E2B and E4B, else of configs/models/gsm8k_qwen2_5_7b.py. On v5p all
weights are trained. Elsewhere additions of rank 32 are, as in configs/models/gsm8k_qwen2_5_7b_lora.py, and the base is in bfloat16.
To fit: on v6e-16 and for E2B on one T4 or v5e the matrices of attention alone have additions, and the engine sleeps while the
learner works. So it does for E4B on one v6e. A free Colab has a T4. The layers of E2B are not scanned, so no stack of them is made.
Hardware: FILE.py:31b-v6e-16 (without a choice too), :31b-v5p-64, :31b-8xh100, :e4b-v6e-1, :e4b-v5p-8, :e4b-h100, :e2b-t4,
:e2b-l4 or :e2b-v5e-1 (not run on one yet).
Needs files: as configs/models/gsm8k_qwen2_5_0_5b.py, with gemma-4-E2B-it/, gemma-4-E4B-it/ or gemma-4-31B-it/ in JAXRL_MODELS.
Command: python -m jaxrl_post.main --config=configs/models/gsm8k_gemma4.py
Plan: python -m jaxrl_post.main --config=configs/models/gsm8k_gemma4.py:e2b-t4 --dry-run --slice=t4
Expected: no measured run yet.
"""

from pathlib import Path

from jaxrl_post.config import chosen, load

CONFIGS = Path(__file__).resolve().parents[1]
MODELS = {"e2b": "gemma-4-E2B-it", "e4b": "gemma-4-E4B-it", "31b": "gemma-4-31B-it"}
ADDITIONS = {
    "lora.rank": 32,
    "lora.alpha": 32.0,
    "lora.rslora": True,
    "lora.base_dtype": "bfloat16",
    "optimizer.lr": 1e-4,
    "optimizer.moments_dtype": "float32",
    "optimizer.sums_dtype": "float32",
    "optimizer.b2": 0.999,
}
ATTENTION = ADDITIONS | {"lora.targets": ("q_proj", "k_proj", "v_proj", "o_proj")}
LARGE = {"engine.slots": 32, "engine.row_sizes": (32, 64), "model.remat_policy": "full"}
SMALL = {"engine.slots": 64, "engine.row_sizes": (64, 128), "batch.rows": 1}
UNSCANNED = SMALL | {"model.scan_layers": "no"}
SLICES = {
    "31b-v6e-16": ATTENTION | LARGE | {"engine.slots": 16, "engine.row_sizes": (16, 32)},
    "31b-v5p-64": LARGE | {"mesh.fsdp": 32, "batch.rows": 32, "engine.sleep": False},
    "31b-8xh100": ADDITIONS | LARGE | {"mesh.fsdp": 8, "batch.rows": 8},
    "e4b-v6e-1": ADDITIONS | SMALL | {"engine.sleep": True},
    "e4b-v5p-8": {"mesh.fsdp": 4},
    "e4b-h100": ADDITIONS,
    "e2b-t4": ATTENTION | UNSCANNED | {"engine.sleep": True},
    "e2b-l4": ADDITIONS | UNSCANNED,
    "e2b-v5e-1": ATTENTION | UNSCANNED | {"engine.sleep": True},
}


def get_config(choice="31b-v6e-16"):
    size = choice.partition("-")[0]
    like = "gsm8k_qwen2_5_0_5b.py" if size in ("e2b", "e4b") else "gsm8k_qwen2_5_7b.py"
    c, model = load(str(CONFIGS / "models" / like)), MODELS.get(size, MODELS["31b"])
    c.name = "gsm8k_" + model.lower().replace("-", "_")
    c.model.path = str(Path(c.model.path).with_name(model))
    return chosen(c, choice, SLICES)
