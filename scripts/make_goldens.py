"""Writes tests/goldens/llama: a small random Llama as transformers saves it, and the scores transformers gives it.

Needs torch and transformers, which the project does not; run it in an environment of their own:

    pip install torch transformers && python scripts/make_goldens.py
    python scripts/make_goldens.py --check DIR     # instead: load a directory that models/hf.py saved, print its scores

The files in the repository were written by torch 2.13.0 and transformers 5.23.0.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import numpy as np
import torch
import transformers

GOLDENS = Path(__file__).resolve().parents[1] / "tests" / "goldens"


def llama(folder: Path) -> None:
    """Grouped heads, llama3 rotation with all three kinds of wavelength, own head; weights rounded to bfloat16."""
    rope = dict(rope_type="llama3", rope_theta=10000.0, factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0,
                original_max_position_embeddings=1000)
    config = transformers.LlamaConfig(
        vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=2048, rms_norm_eps=1e-5, rope_parameters=rope,
        tie_word_embeddings=False, initializer_range=0.2, attn_implementation="eager")
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(config).eval()
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if "norm" in name:
                weight.copy_(1 + 0.3 * torch.randn_like(weight))
    model.to(torch.bfloat16).save_pretrained(folder)
    tokens = torch.randint(0, 64, (2, 40))
    np.savez_compressed(folder / "scores.npz", tokens=tokens.numpy(), scores=scores(folder, tokens))


def scores(folder: Path, tokens: torch.Tensor) -> np.ndarray:
    """float32[B, T, V], computed in float32 by transformers from the directory alone."""
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
    with torch.no_grad():
        return model.eval()(tokens).logits.numpy()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--check", type=Path, help="a saved directory to load instead of writing the goldens")
    given = parser.parse_args()
    if given.check is None:
        llama(GOLDENS / "llama")
        return
    golden = np.load(GOLDENS / "llama" / "scores.npz")
    gap = np.abs(scores(given.check, torch.from_numpy(golden["tokens"])) - golden["scores"]).max()
    print(f"{given.check}: transformers' scores differ from the golden ones by at most {gap:.3g}")


if __name__ == "__main__":
    main()
