"""config.json of transformers 5 rewritten in the spelling of transformers 4, as checkpoints on the Hub have it.

No imports: scripts/make_goldens.py, which runs where jax is not, shows that transformers reads both alike.
"""

from __future__ import annotations


def older(newer: dict) -> dict:
    """The same model in keys of transformers 4, from before layer_types."""
    out = {key: value for key, value in newer.items() if key not in ("dtype", "rope_parameters", "layer_types")}
    if newer["model_type"] == "gemma4_text":  # from before per_layer_config
        heads = next(iter(out.pop("per_layer_config").values()))
        return (
            {key: newer[key] for key in ("rope_parameters", "layer_types")}
            | out
            | {
                "torch_dtype": newer["dtype"],
                "global_head_dim": heads["head_dim"],
                "num_global_key_value_heads": heads.get("num_key_value_heads"),
            }
        )
    out["torch_dtype"], out["transformers_version"] = newer["dtype"], "4.50.0"
    rope, kinds = newer["rope_parameters"], newer.get("layer_types")
    if newer["model_type"] == "gemma3_text":
        out["rope_local_base_freq"] = rope["sliding_attention"]["rope_theta"]
        out["sliding_window_pattern"] = kinds.index("full_attention") + 1
        rope = rope["full_attention"]
    if newer["model_type"] in ("qwen3_5_text", "qwen3_5_moe_text", "qwen3_next"):
        out["full_attention_interval"] = kinds.index("full_attention") + 1
    scaling = {key: value for key, value in rope.items() if key != "rope_theta"}
    out["rope_theta"] = rope["rope_theta"]
    out["rope_scaling"] = None if scaling == {"rope_type": "default"} else scaling
    return out
