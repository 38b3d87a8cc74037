"""Named shapes for random weights. For published models only the shape is here; models/hf.py reads their weights."""

from __future__ import annotations

import re

from jaxrl_post.models.model_config import ModelConfig, RopeScaling

PRESETS: dict[str, ModelConfig] = {
    # For tests: small, so that nothing takes long.
    "tiny": ModelConfig(
        vocab_size=64, embed=32, layers=2, heads=4, kv_heads=2, head_dim=8, ffw=64, max_length=256, tied=True
    ),
    # The demo's policy: a character vocabulary (the assembler replaces vocab_size by the tokenizer's).
    "demo": ModelConfig(
        vocab_size=32, embed=64, layers=3, heads=4, kv_heads=4, head_dim=16, ffw=192, max_length=128, tied=True
    ),
    # Shape of karpathy/tinyllamas stories260K.
    "stories260k": ModelConfig(
        vocab_size=512, embed=64, layers=5, heads=8, kv_heads=4, head_dim=8, ffw=172, max_length=512, tied=True
    ),
    "llama3_2_1b": ModelConfig(
        vocab_size=128256,
        embed=2048,
        layers=16,
        heads=32,
        kv_heads=8,
        head_dim=64,
        ffw=8192,
        max_length=131072,
        rope_theta=500000.0,
        rope_scaling=RopeScaling("llama3", 32.0),
        tied=True,
    ),
    "llama3_1_8b": ModelConfig(
        vocab_size=128256,
        embed=4096,
        layers=32,
        heads=32,
        kv_heads=8,
        head_dim=128,
        ffw=14336,
        max_length=131072,
        rope_theta=500000.0,
        rope_scaling=RopeScaling("llama3", 8.0),
    ),
    "qwen2_5_0_5b": ModelConfig(
        vocab_size=151936,
        embed=896,
        layers=24,
        heads=14,
        kv_heads=2,
        head_dim=64,
        ffw=4864,
        max_length=32768,
        rope_theta=1000000.0,
        norm_eps=1e-6,
        qkv_bias=True,
        tied=True,
    ),
    "qwen2_5_1_5b": ModelConfig(
        vocab_size=151936,
        embed=1536,
        layers=28,
        heads=12,
        kv_heads=2,
        head_dim=128,
        ffw=8960,
        max_length=32768,
        rope_theta=1000000.0,
        norm_eps=1e-6,
        qkv_bias=True,
        tied=True,
    ),
    "qwen3_0_6b": ModelConfig(
        vocab_size=151936,
        embed=1024,
        layers=28,
        heads=16,
        kv_heads=8,
        head_dim=128,
        ffw=3072,
        max_length=40960,
        rope_theta=1000000.0,
        norm_eps=1e-6,
        qk_norm=True,
        tied=True,
    ),
    "qwen2_5_7b": ModelConfig(
        vocab_size=152064,
        embed=3584,
        layers=28,
        heads=28,
        kv_heads=4,
        head_dim=128,
        ffw=18944,
        max_length=32768,
        rope_theta=1000000.0,
        norm_eps=1e-6,
        qkv_bias=True,
    ),
    "qwen3_8b": ModelConfig(
        vocab_size=151936,
        embed=4096,
        layers=36,
        heads=32,
        kv_heads=8,
        head_dim=128,
        ffw=12288,
        max_length=40960,
        rope_theta=1000000.0,
        norm_eps=1e-6,
        qk_norm=True,
    ),
    "qwen3_32b": ModelConfig(
        vocab_size=151936,
        embed=5120,
        layers=64,
        heads=64,
        kv_heads=8,
        head_dim=128,
        ffw=25600,
        max_length=40960,
        rope_theta=1000000.0,
        norm_eps=1e-6,
        qk_norm=True,
    ),
}


def published(name: str) -> ModelConfig | None:
    """Returns the shape of a published model by the name of its folder, such as Qwen2.5-7B-Instruct, or None."""
    plain = re.sub(r"[^a-z0-9]+", "_", name.lower()).replace("llama_3", "llama3").replace("qwen2_5_coder", "qwen2_5")
    fitting = [key for key in PRESETS if f"{plain}_".startswith(f"{key}_")]
    return PRESETS[max(fitting, key=len)] if fitting else None
