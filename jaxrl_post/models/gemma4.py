"""The keys of Gemma 4 in config.json that no other family has (models/families.py).

Windows, attention that sees all, and their heads come from the file. Scores are not scaled. Keys of experts:
models/expert_files.py. Refuses embeddings of each layer that are of another vocabulary.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from jaxrl_post.models import config_keys as keys
from jaxrl_post.models.model_config import FullAttention, ModelConfig
from jaxrl_post.ring.json_text import shown

KIND = "gemma4_text"
LAYER_TYPES = ("full_attention", "sliding_attention")
FIXED = dict(post_norms=True, qk_norm=True, v_norm=True, layer_scalars=True)
OWN = ("full", "shared_layers", "shared_ffw", "layer_embeds")  # fields of ModelConfig that this family alone may set
ABSENT = {
    "rms_norm_eps": 1e-6,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "tie_word_embeddings": True,
    "hidden_activation": "gelu_pytorch_tanh",
    "query_pre_attn_scalar": 1,
    "attn_logit_softcapping": None,
    "final_logit_softcapping": None,
    "sliding_window": 512,
    "sliding_window_pattern": 6,
    "max_position_embeddings": 131072,
    "hidden_size_per_layer_input": 256,
    "vocab_size_per_layer_input": 262144,
    "enable_moe_block": False,
    "attention_k_eq_v": False,
    "num_kv_shared_layers": 0,
    "use_double_wide_mlp": False,
    "global_head_dim": 512,
    "num_global_key_value_heads": None,
}
_ROPE = {
    "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
    "full_attention": {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1e6},
}


def plain(given: Mapping) -> Mapping:
    """Returns the keys as they hold for texts: attention in both directions is of images alone."""
    if given.get("use_bidirectional_attention") != "vision":
        return given
    return {**given, "use_bidirectional_attention": None}


def read(file: Path, given: Mapping, windows: tuple[int | None, ...], heads: tuple[int, int]) -> dict[str, Any]:
    """Returns the fields of ModelConfig that are this family's own, and those of its rotation.

    Args:
      given: the keys of the file over ABSENT.
      heads: kv_heads and head_dim of layers with a window.
    """
    none = given["hidden_size_per_layer_input"] in (0, None)
    width = 0 if none else keys.count(file, given, "hidden_size_per_layer_input")
    if width and given["vocab_size_per_layer_input"] != given.get("vocab_size"):
        raise ValueError(
            f"model {file}: vocab_size_per_layer_input={shown(given['vocab_size_per_layer_input'])} is not supported; it must be "
            f"vocab_size={shown(given.get('vocab_size'))}"
        )
    if windows[-1] is not None:
        raise ValueError(f"model {file}: the last of layer_types must be full_attention, as transformers has it")
    both = keys.section(file, given, "rope_parameters") or _ROPE
    local, whole = (keys.section(file, both, name) for name in ("sliding_attention", "full_attention"))
    for about, known in ((local, ("default",)), (whole, ("default", "proportional"))):
        if about.get("rope_type", "default") not in known or about.get("factor", 1.0) != 1.0:
            raise ValueError(
                f"model {file}: rope parameters {shown(dict(about))} are not supported; known: {', '.join(known)}"
            )
    part = {"partial_rotary_factor": 1.0} | (dict(whole) if whole.get("rope_type") == "proportional" else {})
    same = keys.flag(file, given, "attention_k_eq_v")
    kv_heads, head_dim = _heads(file, given, windows, heads, same)
    shared = int(keys.number(file, given, "num_kv_shared_layers", 0, len(windows) - 1))
    wide = 2 * keys.count(file, given, "intermediate_size") if keys.flag(file, given, "use_double_wide_mlp") else 0
    return dict(
        full=FullAttention(kv_heads, head_dim, same, keys.number(file, part, "partial_rotary_factor", 0.0, 1.0)),
        shared_layers=shared,
        shared_ffw=wide if shared else 0,
        layer_embeds=width,
        rope_theta=keys.above(file, whole, "rope_theta", 0.0),
        local_rope_theta=keys.above(file, local, "rope_theta", 0.0),
    )


def _heads(file: Path, given: Mapping, windows: tuple, others: tuple[int, int], same: bool) -> tuple[int, int]:
    """Returns kv_heads and head_dim of layers without a window: from the newer key by layer, else from those of the hub."""
    layers = keys.section(file, given, "per_layer_config")
    if not layers:
        own = same and given["num_global_key_value_heads"] is not None
        kv_heads = keys.count(file, given, "num_global_key_value_heads") if own else others[0]
        return kv_heads, keys.count(file, given, "global_head_dim")
    absent = {"num_key_value_heads": others[0], "head_dim": others[1]}
    found = [{**absent, **keys.section(file, layers, str(index))} for index in range(len(windows))]
    sizes = {(window is None, *(keys.count(file, one, key) for key in absent)) for window, one in zip(windows, found)}
    whole = [size[1:] for size in sizes if size[0]]
    if len(whole) != 1 or sizes - {(True, *whole[0])} - {(False, *others)}:
        raise ValueError(
            f"model {file}: per_layer_config must give all layers without a window the same heads, and others none"
        )
    return whole[0]


def written(config: ModelConfig) -> dict[str, Any]:
    """Returns the keys of config.json that are this family's own."""
    full, kinds = config.full, [window is None for window in config.windows]
    assert full is not None
    heads = {"head_dim": full.head_dim, "num_key_value_heads": full.kv_heads}
    return {
        "hidden_size_per_layer_input": config.layer_embeds,
        "vocab_size_per_layer_input": config.vocab_size,
        "attention_k_eq_v": full.values_are_keys,
        "num_kv_shared_layers": config.shared_layers,
        "use_double_wide_mlp": config.shared_ffw > 0,
        "global_head_dim": full.head_dim,
        "num_global_key_value_heads": full.kv_heads,
        "per_layer_config": {str(index): heads for index, whole in enumerate(kinds) if whole},
        "sliding_window": next(filter(None, config.windows), 512),
        "layer_types": ["full_attention" if whole else "sliding_attention" for whole in kinds],
        "final_logit_softcapping": config.final_soft_cap,
        "rope_parameters": {
            "sliding_attention": {"rope_type": "default", "rope_theta": config.local_rope_theta},
            "full_attention": {
                "rope_type": "proportional",
                "partial_rotary_factor": full.turned,
                "rope_theta": config.rope_theta,
            },
        },
    }


def differs(config: ModelConfig) -> list[str]:
    """Returns the fields that this family cannot have, of those that are its own."""
    expected = dict(query_scale=1.0, attn_soft_cap=None, rope_scaling=None)
    out = [f"{name}={getattr(config, name)!r}" for name, value in expected.items() if getattr(config, name) != value]
    out += [f"{name}=None" for name in ("full", "local_rope_theta") if getattr(config, name) is None]
    if config.shared_ffw not in (0, 2 * config.ffw):
        out.append(f"shared_ffw={config.shared_ffw}")
    return out + ([] if config.windows[-1] is None else [f"windows={config.windows}"])
