"""Writes tests/goldens: of every model family a small random checkpoint as transformers saves it, and its scores.

Needs torch and transformers, which the project does not; run it in an environment of their own:

    pip install torch==2.13.0 && pip install transformers
    python scripts/make_goldens.py
    python scripts/make_goldens.py --check PYTHON     # instead: what the project (run by PYTHON) saves, and the older
                                                      # spelling of config.json, give transformers the same scores

The files in the repository were written by torch 2.13.0 and transformers 5.23.0; those of families with experts by torch
2.14.1 and transformers 5.24.0.
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np
import torch
import transformers

ROOT = Path(__file__).resolve().parents[1]
GOLDENS = ROOT / "tests" / "goldens"
VOCABULARY, WIDTH, LENGTH = 128, 32, 40
SMALL = dict(vocab_size=VOCABULARY, hidden_size=WIDTH, intermediate_size=48, num_attention_heads=4)
SMALL |= dict(max_position_embeddings=64, rms_norm_eps=1e-5, attn_implementation="eager")
SMALL |= dict(bos_token_id=1, eos_token_id=2, pad_token_id=0)
# A window of 8 and an original length of 16 positions are both shorter than the texts.
LLAMA3 = dict(rope_type="llama3", rope_theta=100.0, factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0)
LLAMA3 |= dict(original_max_position_embeddings=16)
YARN = dict(rope_type="yarn", rope_theta=100.0, factor=4.0, beta_fast=4.0, beta_slow=1.0, truncate=False)
YARN |= dict(original_max_position_embeddings=16)
GEMMA3 = dict(
    full_attention=dict(rope_type="linear", factor=4.0, rope_theta=5000.0),
    sliding_attention=dict(rope_type="default", rope_theta=50.0),
)

GEMMA4 = dict(
    full_attention=dict(rope_type="proportional", partial_rotary_factor=0.25, rope_theta=50.0),
    sliding_attention=dict(rope_type="default", rope_theta=20.0),
)

EXPERTS = dict(num_experts_per_tok=2, moe_intermediate_size=16)
LINEAR = dict(linear_num_key_heads=2, linear_num_value_heads=4, linear_key_head_dim=8, linear_value_head_dim=12)


def plain(theta: float) -> dict:
    return dict(rope_type="default", rope_theta=theta)


# Family -> the name of its model's class, the dtype it is saved in, the largest file, and its config beside SMALL.
FAMILIES: dict[str, tuple[str, str, str, dict]] = {
    "llama2": (
        "Llama",
        "float16",
        "1GB",
        dict(num_hidden_layers=2, num_key_value_heads=4, rope_parameters=plain(300.0)),
    ),
    "llama3": (
        "Llama",
        "bfloat16",
        "30KB",
        dict(num_hidden_layers=3, num_key_value_heads=2, rope_parameters=LLAMA3, tie_word_embeddings=True),
    ),
    "qwen2": (
        "Qwen2",
        "bfloat16",
        "1GB",
        dict(num_hidden_layers=3, num_key_value_heads=2, rope_parameters=plain(1000.0), tie_word_embeddings=True)
        | dict(use_sliding_window=True, sliding_window=8, max_window_layers=1),
    ),
    "qwen3": (
        "Qwen3",
        "bfloat16",
        "30KB",
        dict(num_hidden_layers=3, num_key_value_heads=2, head_dim=16, rope_parameters=plain(1000.0)),
    ),
    "mistral": (
        "Mistral",
        "float32",
        "1GB",
        dict(num_hidden_layers=2, num_key_value_heads=1, sliding_window=8, rope_parameters=plain(300.0)),
    ),
    "gemma2": (
        "Gemma2",
        "bfloat16",
        "30KB",
        dict(num_hidden_layers=3, num_key_value_heads=2, head_dim=16, query_pre_attn_scalar=12, sliding_window=8)
        | dict(attn_logit_softcapping=2.0, final_logit_softcapping=6.0, rope_parameters=plain(300.0)),
    ),
    "gemma3": (
        "Gemma3",
        "bfloat16",
        "1GB",
        dict(num_hidden_layers=4, num_key_value_heads=1, head_dim=16, query_pre_attn_scalar=12, sliding_window=8)
        | dict(layer_types=["sliding_attention", "sliding_attention", "full_attention", "sliding_attention"])
        | dict(rope_parameters=GEMMA3),
    ),
    "gemma4": (
        "Gemma4",
        "bfloat16",
        "1GB",
        dict(num_hidden_layers=4, num_key_value_heads=2, head_dim=8, sliding_window=8, hidden_size_per_layer_input=0)
        | dict(global_head_dim=16, num_global_key_value_heads=1, attention_k_eq_v=True, final_logit_softcapping=6.0)
        | dict(rope_parameters=GEMMA4)
        | dict(layer_types=[f"{kind}_attention" for kind in ("sliding", "full", "sliding", "full")]),
    ),
    "gemma4_embeds": (  # as E2B
        "Gemma4",
        "bfloat16",
        "1GB",
        dict(num_hidden_layers=5, num_key_value_heads=1, head_dim=8, sliding_window=8, global_head_dim=16)
        | dict(hidden_size_per_layer_input=8, vocab_size_per_layer_input=VOCABULARY, final_logit_softcapping=6.0)
        | dict(num_kv_shared_layers=2, use_double_wide_mlp=True, intermediate_size=16, rope_parameters=GEMMA4)
        | dict(layer_types=[f"{kind}_attention" for kind in ("sliding", "sliding", "full", "sliding", "full")]),
    ),
    "gemma4_moe": (  # as 26B-A4B
        "Gemma4",
        "bfloat16",
        "1GB",
        dict(num_hidden_layers=2, num_key_value_heads=2, head_dim=8, sliding_window=8, hidden_size_per_layer_input=0)
        | dict(global_head_dim=16, num_global_key_value_heads=1, attention_k_eq_v=True, final_logit_softcapping=6.0)
        | dict(enable_moe_block=True, num_experts=5, top_k_experts=2, moe_intermediate_size=16)
        | dict(layer_types=["sliding_attention", "full_attention"], rope_parameters=GEMMA4),
    ),
    "qwen2_moe": (
        "Qwen2Moe",
        "bfloat16",
        "1GB",
        dict(num_hidden_layers=2, num_key_value_heads=2, rope_parameters=plain(1000.0), **EXPERTS)
        | dict(num_experts=6, shared_expert_intermediate_size=24, norm_topk_prob=False)
        | dict(use_sliding_window=True, sliding_window=8, max_window_layers=1),
    ),
    "qwen3_moe": (
        "Qwen3Moe",
        "bfloat16",
        "40KB",
        dict(num_hidden_layers=3, num_key_value_heads=2, head_dim=8, rope_parameters=plain(1000.0), **EXPERTS)
        | dict(num_experts=5, mlp_only_layers=[0], norm_topk_prob=True),
    ),
    "mixtral": (
        "Mixtral",
        "bfloat16",
        "1GB",
        dict(num_hidden_layers=2, num_key_value_heads=2, rope_parameters=plain(300.0), sliding_window=8)
        | dict(num_local_experts=8, num_experts_per_tok=2, intermediate_size=16),
    ),
    "gpt_oss": (
        "GptOss",
        "bfloat16",
        "1GB",
        dict(num_hidden_layers=2, num_key_value_heads=2, head_dim=16, sliding_window=8, rope_parameters=YARN)
        | dict(num_local_experts=5, num_experts_per_tok=3, intermediate_size=20, swiglu_limit=1.0),
    ),
    "qwen3_5": (
        "Qwen3_5",
        "bfloat16",
        "1GB",
        dict(vocab_size=64, num_hidden_layers=3, num_key_value_heads=2, head_dim=16, **LINEAR)
        | dict(rope_parameters=plain(300.0) | dict(partial_rotary_factor=0.5))
        | dict(layer_types=[f"{kind}_attention" for kind in ("linear", "full", "linear")]),
    ),
    "qwen3_5_moe": (
        "Qwen3_5Moe",
        "bfloat16",
        "1GB",
        dict(vocab_size=64, num_hidden_layers=2, num_key_value_heads=2, head_dim=16, **LINEAR, **EXPERTS)
        | dict(rope_parameters=plain(300.0) | dict(partial_rotary_factor=0.5), num_experts=5)
        | dict(layer_types=["linear_attention", "full_attention"], shared_expert_intermediate_size=24),
    ),
    "qwen3_next": (
        "Qwen3Next",
        "bfloat16",
        "1GB",
        dict(vocab_size=64, num_hidden_layers=3, num_key_value_heads=2, head_dim=16, **LINEAR, **EXPERTS)
        | dict(rope_parameters=plain(300.0) | dict(partial_rotary_factor=0.5), num_experts=5, mlp_only_layers=[0])
        | dict(layer_types=[f"{kind}_attention" for kind in ("linear", "linear", "full")])
        | dict(shared_expert_intermediate_size=24, norm_topk_prob=False),
    ),
}
TEXTS = {"qwen3_5": 5}  # packed in one row they are longer than a chunk of the recurrence; of other families 2
WITH_PICTURES = ("Gemma3", "Gemma4", "Qwen3_5", "Qwen3_5Moe")  # the config of the text model has a name of its own


def built(name: str, changes: dict) -> transformers.PreTrainedModel:
    """Returns a model of a class, with random weights."""
    config = getattr(transformers, f"{name}{'Text' * (name in WITH_PICTURES)}Config")
    return getattr(transformers, f"{name}ForCausalLM")(config(**SMALL | changes))


def make(family: str) -> None:
    """Returns random weights: no norm at its neutral value, no bias 0, attention far from even, scores far apart."""
    name, dtype, largest, changes = FAMILIES[family]
    model = built(name, changes).eval()
    generator = torch.Generator().manual_seed(sum(family.encode()))
    with torch.no_grad():
        scalars = [(name, one) for name, one in model.named_buffers() if name.endswith("layer_scalar")]
        for name, weight in (*model.named_parameters(), *scalars):
            noise = torch.randn(weight.shape, generator=generator)
            if name.endswith("bias"):
                weight.copy_(0.5 * noise)
            elif weight.ndim == 1:
                weight.copy_(0.3 * noise + neutral(family, name))
            elif "embed" in name:
                weight.copy_((0.5 if model.config.tie_word_embeddings else 1.0) * noise)
            else:
                # Scores of experts far apart: two that are nearly equal could change places by rounding.
                gain = 3.0 if "lm_head" in name or name.endswith(("mlp.gate.weight", "router.weight")) else 1.3
                gain = 3.0 * WIDTH**0.5 if name.endswith("router.proj.weight") else gain  # what it reads is scaled down
                weight.copy_(gain * weight.shape[-1] ** -0.5 * noise)
    folder = GOLDENS / family
    shutil.rmtree(folder, ignore_errors=True)
    model.to(getattr(torch, dtype)).save_pretrained(folder, max_shard_size=largest)
    tokens = torch.randint(0, model.config.vocab_size, (TEXTS.get(family, 2), LENGTH), generator=generator)
    golden = scores(folder, tokens)
    assert golden.std() >= 2, (family, golden.std())
    np.savez_compressed(folder / "scores.npz", tokens=tokens.numpy().astype(np.int32), scores=golden)
    size = sum(file.stat().st_size for file in folder.iterdir())
    print(f"{family}: standard deviation {golden.std():.2f}, {size / 1000:.0f} kB, {len(list(folder.iterdir()))} files")


def neutral(family: str, name: str) -> float:
    """Returns the value that a norm's weights lie around.

    Norms of Gemma 2 and 3, Qwen3.5 and Qwen3-Next multiply by 1 + weight, but not that of what a state gives. Gemma's layers are made to
    outweigh the embedding. Otherwise, with a tied head, the best next token is always the last one. States last some 12 tokens.
    """
    if family.startswith(("qwen3_5", "qwen3_next")):
        return {"A_log": -2.5, "norm.weight": 1.0}.get(name.partition(".linear_attn.")[2], 0.0)
    if "gemma" not in family:
        return 1.0
    if family.startswith("gemma4"):
        return 3.0 if "post_attention" in name or "post_feedforward" in name else 1.0
    return 2.0 if "post_attention" in name or "post_feedforward" in name else 0.0


def scores(folder: Path, tokens: torch.Tensor) -> np.ndarray:
    """Returns float32[B, T, V], computed in float32 by transformers from the directory alone."""
    model, about = transformers.AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager", output_loading_info=True
    )
    assert not any(about.values()), (folder, about)
    with torch.no_grad():
        return model.eval()(tokens).logits.numpy()


SAVE = """
import sys
from pathlib import Path
from jaxrl_post.models import hf
for golden in (Path(sys.argv[1]) / family for family in sys.argv[3:]):
    config, params = hf.load(golden)
    hf.save(Path(sys.argv[2]) / "one" / golden.name, config, params)
    hf.save(Path(sys.argv[2]) / "several" / golden.name, config, params, max_file_bytes=40_000)
"""


def check(python: str, families: list[str]) -> dict[str, dict[str, float]]:
    """Returns for each family the largest difference of transformers' scores from the golden ones, by what was loaded."""
    sys.path.insert(0, str(ROOT / "tests"))
    from older_config import older

    out = {}
    with tempfile.TemporaryDirectory() as made:
        subprocess.run([python, "-c", SAVE, str(GOLDENS), made, *families], cwd=ROOT, check=True)
        for family in families:
            golden = np.load(GOLDENS / family / "scores.npz")
            folders = {name: Path(made) / name / family for name in ("one", "several", "older")}
            shutil.copytree(GOLDENS / family, folders["older"])
            newer = json.loads((GOLDENS / family / "config.json").read_text())
            (folders["older"] / "config.json").write_text(json.dumps(older(newer)))
            tokens = torch.from_numpy(golden["tokens"])
            out[family] = {
                name: float(np.abs(scores(folder, tokens) - golden["scores"]).max()) for name, folder in folders.items()
            }
            assert len(list(folders["several"].glob("*.safetensors"))) > 1
    return out


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--check", metavar="PYTHON", help="the project's python; prints a JSON object of differences")
    parser.add_argument("--only", nargs="+", choices=list(FAMILIES), help="these families alone")
    given = parser.parse_args()
    families = given.only or list(FAMILIES)
    if given.check:
        print(json.dumps(check(given.check, families), indent=1))
        return
    for family in families:
        make(family)


if __name__ == "__main__":
    main()
