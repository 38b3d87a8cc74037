"""Writes tests/goldens: of every model family a small random checkpoint as transformers saves it, and its scores.

Needs torch and transformers, which the project does not; run it in an environment of their own:

    pip install torch==2.13.0 && pip install transformers
    python scripts/make_goldens.py
    python scripts/make_goldens.py --check PYTHON     # instead: what the project (run by PYTHON) saves, and the older
                                                      # spelling of config.json, give transformers the same scores

The files in the repository were written by torch 2.13.0 and transformers 5.23.0.
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
import transformers

ROOT = Path(__file__).resolve().parents[1]
GOLDENS = ROOT / "tests" / "goldens"
VOCABULARY, WIDTH, LENGTH = 128, 32, 40
SMALL = dict(
    vocab_size=VOCABULARY,
    hidden_size=WIDTH,
    intermediate_size=48,
    num_attention_heads=4,
    max_position_embeddings=64,
    rms_norm_eps=1e-5,
    attn_implementation="eager",
    bos_token_id=1,
    eos_token_id=2,
    pad_token_id=0,
)
# A window of 8 and an original length of 16 positions are both shorter than the texts.
LLAMA3 = dict(
    rope_type="llama3",
    rope_theta=100.0,
    factor=8.0,
    low_freq_factor=1.0,
    high_freq_factor=4.0,
    original_max_position_embeddings=16,
)
GEMMA3 = dict(
    full_attention=dict(rope_type="linear", factor=4.0, rope_theta=5000.0),
    sliding_attention=dict(rope_type="default", rope_theta=50.0),
)


def plain(theta: float) -> dict:
    return dict(rope_type="default", rope_theta=theta)


# Family -> its model, the dtype it is saved in, and the largest file.
FAMILIES: dict[str, tuple[Callable, str, str]] = {
    "llama2": (
        lambda: transformers.LlamaForCausalLM(
            transformers.LlamaConfig(**SMALL, num_hidden_layers=2, num_key_value_heads=4, rope_parameters=plain(300.0))
        ),
        "float16",
        "1GB",
    ),
    "llama3": (
        lambda: transformers.LlamaForCausalLM(
            transformers.LlamaConfig(
                **SMALL, num_hidden_layers=3, num_key_value_heads=2, rope_parameters=LLAMA3, tie_word_embeddings=True
            )
        ),
        "bfloat16",
        "30KB",
    ),
    "qwen2": (
        lambda: transformers.Qwen2ForCausalLM(
            transformers.Qwen2Config(
                **SMALL,
                num_hidden_layers=3,
                num_key_value_heads=2,
                rope_parameters=plain(1000.0),
                tie_word_embeddings=True,
                use_sliding_window=True,
                sliding_window=8,
                max_window_layers=1,
            )
        ),
        "bfloat16",
        "1GB",
    ),
    "qwen3": (
        lambda: transformers.Qwen3ForCausalLM(
            transformers.Qwen3Config(
                **SMALL, num_hidden_layers=3, num_key_value_heads=2, head_dim=16, rope_parameters=plain(1000.0)
            )
        ),
        "bfloat16",
        "30KB",
    ),
    "mistral": (
        lambda: transformers.MistralForCausalLM(
            transformers.MistralConfig(
                **SMALL, num_hidden_layers=2, num_key_value_heads=1, sliding_window=8, rope_parameters=plain(300.0)
            )
        ),
        "float32",
        "1GB",
    ),
    "gemma2": (
        lambda: transformers.Gemma2ForCausalLM(
            transformers.Gemma2Config(
                **SMALL,
                num_hidden_layers=3,
                num_key_value_heads=2,
                head_dim=16,
                query_pre_attn_scalar=12,
                sliding_window=8,
                attn_logit_softcapping=2.0,
                final_logit_softcapping=6.0,
                rope_parameters=plain(300.0),
            )
        ),
        "bfloat16",
        "30KB",
    ),
    "gemma3": (
        lambda: transformers.Gemma3ForCausalLM(
            transformers.Gemma3TextConfig(
                **SMALL,
                num_hidden_layers=4,
                num_key_value_heads=1,
                head_dim=16,
                query_pre_attn_scalar=12,
                sliding_window=8,
                layer_types=["sliding_attention", "sliding_attention", "full_attention", "sliding_attention"],
                rope_parameters=GEMMA3,
            )
        ),
        "bfloat16",
        "1GB",
    ),
}


def make(family: str) -> None:
    """Returns random weights: no norm at its neutral value, no bias 0, attention far from even, scores far apart."""
    build, dtype, largest = FAMILIES[family]
    model = build().eval()
    generator = torch.Generator().manual_seed(sum(family.encode()))
    with torch.no_grad():
        for name, weight in model.named_parameters():
            noise = torch.randn(weight.shape, generator=generator)
            if name.endswith("bias"):
                weight.copy_(0.5 * noise)
            elif weight.ndim == 1:
                weight.copy_(0.3 * noise + neutral(family, name))
            elif "embed" in name:
                weight.copy_((0.5 if model.config.tie_word_embeddings else 1.0) * noise)
            else:
                gain = 3.0 if "lm_head" in name else 1.3
                weight.copy_(gain * weight.shape[1] ** -0.5 * noise)
    folder = GOLDENS / family
    shutil.rmtree(folder, ignore_errors=True)
    model.to(getattr(torch, dtype)).save_pretrained(folder, max_shard_size=largest)
    tokens = torch.randint(0, VOCABULARY, (2, LENGTH), generator=generator)
    golden = scores(folder, tokens)
    assert golden.std() >= 2, (family, golden.std())
    np.savez_compressed(folder / "scores.npz", tokens=tokens.numpy().astype(np.int32), scores=golden)
    size = sum(file.stat().st_size for file in folder.iterdir())
    print(f"{family}: standard deviation {golden.std():.2f}, {size / 1000:.0f} kB, {len(list(folder.iterdir()))} files")


def neutral(family: str, name: str) -> float:
    """Returns the value that a norm's weights lie around.

    Gemma's norms multiply by 1 + weight. Its layers are made to outweigh the embedding. Otherwise, with a tied head,
    the best next token is always the last one.
    """
    if "gemma" not in family:
        return 1.0
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
for golden in sorted(Path(sys.argv[1]).iterdir()):
    config, params = hf.load(golden)
    hf.save(Path(sys.argv[2]) / "one" / golden.name, config, params)
    hf.save(Path(sys.argv[2]) / "several" / golden.name, config, params, max_file_bytes=40_000)
"""


def check(python: str) -> dict[str, dict[str, float]]:
    """Returns for each family the largest difference of transformers' scores from the golden ones, by what was loaded."""
    sys.path.insert(0, str(ROOT / "tests"))
    from older_config import older

    out = {}
    with tempfile.TemporaryDirectory() as made:
        subprocess.run([python, "-c", SAVE, str(GOLDENS), made], cwd=ROOT, check=True)
        for family in FAMILIES:
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
    parser.add_argument("--only", choices=list(FAMILIES), help="write this family alone")
    given = parser.parse_args()
    if given.check:
        print(json.dumps(check(given.check), indent=1))
        return
    for family in [given.only] if given.only else FAMILIES:
        make(family)


if __name__ == "__main__":
    main()
