"""Named shapes for random weights. For published models only the shape is here; models/hf.py reads their weights."""

from __future__ import annotations

import re
from typing import Any

from jaxrl_post.models.model_config import Experts, FullAttention, LinearAttention, ModelConfig, RopeScaling

_SIZES = ("vocab_size", "embed", "layers", "heads", "kv_heads", "head_dim", "ffw", "max_length")
_QWEN2 = dict(rope_theta=1000000.0, norm_eps=1e-6, qkv_bias=True)
_QWEN3 = dict(rope_theta=1000000.0, norm_eps=1e-6, qk_norm=True)
_QWEN3_YARN = RopeScaling("yarn", 4.0, original_length=32768)


def _shape(*sizes: int, **variant: Any) -> ModelConfig:
    """Returns a shape by its sizes, in the order of _SIZES, and what differs from a plain decoder."""
    return ModelConfig(**dict(zip(_SIZES, sizes, strict=True)), **variant)


def _llama3(*sizes: int, factor: float, **variant: Any) -> ModelConfig:
    return _shape(*sizes, rope_theta=500000.0, rope_scaling=RopeScaling("llama3", factor), **variant)


def _gpt_oss(layers: int, experts: int) -> ModelConfig:
    """Returns a shape of gpt-oss (arXiv 2508.10925), whose layers with an even index have a window."""
    yarn = RopeScaling("yarn", 32.0, original_length=4096, truncate=False)
    mixture = Experts(experts, 4, 2880, biased=True, limit=7.0)
    biased = dict(qkv_bias=True, o_bias=True, sinks=True, windows=(128, None) * (layers // 2))
    sizes = (201088, 2880, layers, 64, 8, 64, 2880, 131072)
    return _shape(*sizes, rope_theta=150000.0, rope_scaling=yarn, norm_eps=1e-5, experts=mixture, **biased)


def _qwen3_5(*sizes: int, linear: LinearAttention, rope_theta: float = 10000000.0, **variant: Any) -> ModelConfig:
    """Returns a shape of Qwen3.5: every fourth layer has attention, and the others of `linear` a gated delta rule."""
    layers, head_dim = sizes[2], sizes[5]
    recurrent = linear._replace(layers=tuple(at for at in range(layers) if (at + 1) % 4))
    fixed = dict(norm_eps=1e-6, norm_offset=1.0, qk_norm=True, attn_gate=True, rotary_dim=max(head_dim // 4, 2))
    return _shape(*sizes, linear=recurrent, rope_theta=rope_theta, **fixed, **variant)


def _gemma4(*sizes: int, every: int = 6, window: int = 1024, full: FullAttention, **variant: Any) -> ModelConfig:
    """Returns a shape of Gemma 4: the last of `every` layers sees all positions by heads of 512, the others a window."""
    windows = (*(window,) * (every - 1), None) * (sizes[2] // every)
    norms = dict(norm_eps=1e-6, post_norms=True, qk_norm=True, v_norm=True, layer_scalars=True)
    scores = dict(query_scale=1.0, rope_theta=1000000.0, local_rope_theta=10000.0, final_soft_cap=30.0, tied=True)
    fixed = dict(embed_scale=sizes[1] ** 0.5, activation="gelu_tanh", **norms, **scores)
    return _shape(*sizes, windows=windows, full=full._replace(turned=0.25), **fixed, **variant)


PRESETS: dict[str, ModelConfig] = {
    # For tests: small, so that nothing takes long.
    "tiny": _shape(64, 32, 2, 4, 2, 8, 64, 256, tied=True),
    "tiny_moe": _shape(64, 32, 2, 4, 2, 8, 64, 256, tied=True, qk_norm=True, experts=Experts(8, 2, 24)),
    "tiny_hybrid": _qwen3_5(
        *(64, 32, 4, 4, 2, 8, 64, 256), linear=LinearAttention(2, 4, 8, 8, 4, ()), rope_theta=10000.0, tied=True
    ),
    # The demo's policy: a character vocabulary (the assembler replaces vocab_size by the tokenizer's).
    "demo": _shape(32, 64, 3, 4, 4, 16, 192, 128, tied=True),
    "demo_moe": _shape(32, 64, 3, 4, 4, 16, 192, 128, tied=True, qk_norm=True, experts=Experts(8, 2, 48)),
    "demo_hybrid": _qwen3_5(
        *(32, 64, 4, 4, 4, 16, 144, 128), linear=LinearAttention(2, 4, 16, 16, 4, ()), rope_theta=10000.0, tied=True
    ),
    # Shape of karpathy/tinyllamas stories260K.
    "stories260k": _shape(512, 64, 5, 8, 4, 8, 172, 512, tied=True),
    "llama3_2_1b": _llama3(128256, 2048, 16, 32, 8, 64, 8192, 131072, factor=32.0, tied=True),
    "llama3_1_8b": _llama3(128256, 4096, 32, 32, 8, 128, 14336, 131072, factor=8.0),
    "qwen2_5_0_5b": _shape(151936, 896, 24, 14, 2, 64, 4864, 32768, tied=True, **_QWEN2),
    "qwen2_5_1_5b": _shape(151936, 1536, 28, 12, 2, 128, 8960, 32768, tied=True, **_QWEN2),
    "qwen3_0_6b": _shape(151936, 1024, 28, 16, 8, 128, 3072, 40960, tied=True, **_QWEN3),
    "qwen2_5_7b": _shape(152064, 3584, 28, 28, 4, 128, 18944, 32768, **_QWEN2),
    "qwen3_8b": _shape(151936, 4096, 36, 32, 8, 128, 12288, 40960, **_QWEN3),
    "qwen3_32b": _shape(151936, 5120, 64, 64, 8, 128, 25600, 40960, **_QWEN3),
    # The same to 131,072 positions, as their model cards say: rope_scaling of config.json, and "-128K" behind the folder's name.
    "qwen3_8b_128k": _shape(151936, 4096, 36, 32, 8, 128, 12288, 131072, rope_scaling=_QWEN3_YARN, **_QWEN3),
    "qwen3_32b_128k": _shape(151936, 5120, 64, 64, 8, 128, 25600, 131072, rope_scaling=_QWEN3_YARN, **_QWEN3),
    "qwen3_30b_a3b": _shape(151936, 2048, 48, 32, 4, 128, 6144, 40960, experts=Experts(128, 8, 768), **_QWEN3),
    # Sizes of Qwen3.5 and Gemma 4: text_config of each checkpoint's config.json, and the converter of transformers 5.24.
    "qwen3_5_0_8b": _qwen3_5(
        *(248320, 1024, 24, 8, 2, 256, 3584, 262144), linear=LinearAttention(16, 16, 128, 128, 4, ()), tied=True
    ),
    "qwen3_5_9b": _qwen3_5(
        *(248320, 4096, 32, 16, 4, 256, 12288, 262144), linear=LinearAttention(16, 32, 128, 128, 4, ())
    ),
    "qwen3_5_35b_a3b": _qwen3_5(
        *(248320, 2048, 40, 16, 2, 256, 512, 262144),
        linear=LinearAttention(16, 32, 128, 128, 4, ()),
        experts=Experts(256, 8, 512, shared_ffw=512),
    ),
    "gemma4_e2b": _gemma4(
        *(262144, 1536, 35, 8, 1, 256, 6144, 131072),
        **dict(every=5, window=512, full=FullAttention(1, 512), shared_layers=20, shared_ffw=12288, layer_embeds=256),
    ),
    "gemma4_e4b": _gemma4(
        *(262144, 2560, 42, 8, 2, 256, 10240, 131072),
        **dict(window=512, full=FullAttention(2, 512), shared_layers=18, layer_embeds=256),
    ),
    "gemma4_26b_a4b": _gemma4(
        *(262144, 2816, 30, 16, 8, 256, 2112, 262144),
        full=FullAttention(2, 512, True),
        experts=Experts(128, 8, 704, beside=True),
    ),
    "gemma4_31b": _gemma4(*(262144, 5376, 60, 32, 16, 256, 21504, 262144), full=FullAttention(4, 512, True)),
    "gpt_oss_20b": _gpt_oss(24, 32),
    "gpt_oss_120b": _gpt_oss(36, 128),
}


def published(name: str) -> ModelConfig | None:
    """Returns the shape of a published model by the name of its folder, such as Qwen2.5-7B-Instruct, or None."""
    plain = (
        re.sub(r"[^a-z0-9]+", "_", name.lower())
        .replace("llama_3", "llama3")
        .replace("gemma_4", "gemma4")
        .replace("qwen2_5_coder", "qwen2_5")
    )
    fitting = [key for key in PRESETS if f"{plain}_".startswith(f"{key}_")]
    return PRESETS[max(fitting, key=len)] if fitting else None
