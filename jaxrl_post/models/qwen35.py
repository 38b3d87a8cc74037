"""The keys of Qwen3.5 and Qwen3-Next in config.json that no other family has (models/families.py).

Reads the text models, of Qwen3.5 with experts and without. Some of their layers have a gated delta rule in the place of
attention. The others have a gate on attention's output, and rotate a part of each head. Parts of a rotation for pictures
(mrope) are those of a plain one where all tokens are text.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from jaxrl_post.models import config_keys as keys
from jaxrl_post.models.model_config import LinearAttention, ModelConfig
from jaxrl_post.ring.json_text import shown

KIND, WITH_EXPERTS, NEXT = "qwen3_5_text", "qwen3_5_moe_text", "qwen3_next"
LAYER_TYPES = ("full_attention", "linear_attention")
FIXED = dict(norm_offset=1.0, qk_norm=True, attn_gate=True)
OWN = ("linear", "rotary_dim")  # fields of ModelConfig that these families alone may set
ABSENT = {
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "partial_rotary_factor": 0.25,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "tie_word_embeddings": False,
    "hidden_act": "silu",
    "max_position_embeddings": 32768,
    "full_attention_interval": 4,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_conv_kernel_dim": 4,
}
# Every layer has experts, so no key says how wide another feed-forward would be.
ABSENT_WITH_EXPERTS = ABSENT | {"num_key_value_heads": 2, "intermediate_size": 512}
ABSENT_OF_NEXT = ABSENT | {"num_key_value_heads": 2, "intermediate_size": 5632}
# Two tensors of Qwen3-Next hold several leaves, and of each the part of a key head before those of the next.
BY_KEY_HEAD = {f"linear_{name}": "linear_attn.in_proj_qkvz.weight" for name in "qkvz"}
BY_KEY_HEAD |= dict.fromkeys(("linear_rate", "linear_decay"), "linear_attn.in_proj_ba.weight")
_SIZES = {
    "key_heads": "linear_num_key_heads",
    "value_heads": "linear_num_value_heads",
    "key_dim": "linear_key_head_dim",
    "value_dim": "linear_value_head_dim",
    "width": "linear_conv_kernel_dim",
}

# The convolution is followed by hidden_act too, and here by silu alone. Swish is another name of it.
_ONLY = {"hidden_act": "silu", "output_gate_type": "swish", "attn_output_gate": True}


def plain(given: Mapping) -> Mapping:
    """Returns the keys as they hold for texts: those that were given."""
    return given


def read(file: Path, given: Mapping, windows: tuple[int | None, ...], heads: tuple[int, int]) -> dict[str, Any]:
    """Returns the fields of ModelConfig that are this family's own, and those of its rotation.

    Args:
      given: the keys of the file over ABSENT.
      heads: kv_heads and head_dim of layers with attention.
    """
    for key, wanted in _ONLY.items():
        if given.get(key) not in (wanted, None):
            raise ValueError(
                f"model {file}: {key}={shown(given[key])} is not supported; the nearest valid value is {shown(wanted)}"
            )
    named, every = keys.texts(file, given, "layer_types"), keys.count(file, given, "full_attention_interval")
    kinds = named or [LAYER_TYPES[bool((at + 1) % every)] for at in range(len(windows))]
    sizes = {name: keys.count(file, given, key) for name, key in _SIZES.items()}
    about = keys.section(file, given, "rope_parameters") or keys.section(file, given, "rope_scaling")
    about = {key: given[key] for key in ("rope_theta", "partial_rotary_factor")} | dict(about)
    if about.get("rope_type", about.get("type", "default")) != "default":
        raise ValueError(f"model {file}: rope parameters {shown(about)} are not supported; rope_type must be default")
    turned = int(heads[1] * keys.number(file, about, "partial_rotary_factor", 0.0, 1.0))
    return dict(
        linear=LinearAttention(**sizes, layers=tuple(at for at, kind in enumerate(kinds) if kind == LAYER_TYPES[1])),
        rotary_dim=None if turned == heads[1] else turned,
        rope_theta=keys.above(file, about, "rope_theta", 0.0),
    )


def written(config: ModelConfig) -> dict[str, Any]:
    """Returns the keys of config.json that are this family's own."""
    assert config.linear is not None
    part = (config.rotary_dim or config.head_dim) / config.head_dim
    # Readers round the product with head_dim down, which may be just below rotary_dim.
    part = part if config.head_dim * part >= (config.rotary_dim or 0) else math.nextafter(part, 1.0)
    return {
        "layer_types": [LAYER_TYPES[index in config.linear.layers] for index in range(config.layers)],
        "rope_parameters": {"rope_type": "default", "rope_theta": config.rope_theta, "partial_rotary_factor": part},
        "attn_output_gate": True,
        **{key: getattr(config.linear, name) for name, key in _SIZES.items()},
    }


def differs(config: ModelConfig) -> list[str]:
    """Returns the fields that this family cannot have, of those that are its own."""
    expected = dict(local_rope_theta=None, rope_scaling=None, activation="silu")
    out = [f"{name}={getattr(config, name)!r}" for name, value in expected.items() if getattr(config, name) != value]
    return out + (["linear=None"] if config.linear is None else [])
