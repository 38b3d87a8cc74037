"""Families against transformers: the golden scores of tests/goldens, ours, and the faults that must part them.

Each fault is what a reader or a decoder could get wrong in that family. It is planted by changing config or weights after
they were read, or by changing a function of the computation. The arms are not jitted: each fault would be compiled anew,
in six times the time.
"""

from __future__ import annotations

import dataclasses
import json
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
from dense_attend import dense, in_order
from older_config import older

from jaxrl_post.engine import recurrent_rows
from jaxrl_post.kernels import attention
from jaxrl_post.models import decoder, experts, gated_delta, hf
from jaxrl_post.models.model_config import ModelConfig, RopeScaling
from jaxrl_post.trainer import recurrence
from jaxrl_post.trainer.attention import packed

GOLDENS = Path(__file__).parent / "goldens"
WITH_EXPERTS = ("qwen2_moe", "qwen3_moe", "mixtral", "gpt_oss")  # with attention in every layer
LINEAR = ("qwen3_5", "qwen3_5_moe", "qwen3_next")  # with a gated delta rule in some layers
BY_EXPERT = (*WITH_EXPERTS[:3], "qwen3_5_moe", "qwen3_next")  # files with a tensor for each matrix of each expert
FAMILIES = (
    "llama2",
    "llama3",
    "qwen2",
    "qwen3",
    "mistral",
    "gemma2",
    "gemma3",
    "gemma4",
    "gemma4_embeds",
    "gemma4_moe",
    *WITH_EXPERTS,
    *LINEAR,
)
BOUND = 1e-4


def golden(family: str) -> tuple[np.ndarray, np.ndarray]:
    """int32[B, T] tokens, float32[B, T, V] scores, as transformers computed them."""
    stored = np.load(GOLDENS / family / "scores.npz")
    return stored["tokens"], stored["scores"]


def spelled(family: str, spelling: str, folder: Path) -> Path:
    """The golden directory; with spelling "older" a copy in `folder` whose config.json is that of transformers 4."""
    if spelling == "newer":
        return GOLDENS / family
    shutil.copytree(GOLDENS / family, folder / family)
    file = folder / family / "config.json"
    file.write_text(json.dumps(older(json.loads(file.read_text()))))
    return folder / family


def dense_arm(config: ModelConfig, params: dict, tokens: jax.Array) -> jax.Array:
    """float32[B, T, V] of our decoder over the attention of tests/dense_attend.py."""
    positions = jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape)
    h, _ = decoder.hidden(params, config, tokens, positions, dense(positions), (), recur=in_order)
    return decoder.logits(params, config, h)


def packed_arm(config: ModelConfig, params: dict, tokens: jax.Array) -> jax.Array:
    """The same over the trainer's attention, all texts in one row."""
    B, T = tokens.shape
    segments = jnp.repeat(jnp.arange(1, B + 1), T)[None]
    rows, recur = (tokens.reshape(-1), jnp.tile(jnp.arange(T), B)), recurrence.packed(segments)
    h, _ = decoder.hidden(params, config, *rows, packed(segments), (), recur=recur)
    return decoder.logits(params, config, h).reshape(B, T, -1)


def paged_arm(config: ModelConfig, params: dict, tokens: jax.Array) -> jax.Array:
    """The same over the engine's caches, one slot per text, pages of 16 in no order."""
    B, T = tokens.shape
    blocks = -(-T // 16)
    rows = attention.Rows(
        jnp.repeat(jnp.arange(B), T),
        jnp.tile(jnp.arange(T), B),
        jnp.ones(B * T, bool),
        jnp.arange(B * blocks)[::-1].reshape(B, blocks),
    )

    def attend(layer, q, k, v, cache, **how):
        full = attention.write(attention.empty(B * blocks, 16, *k.shape[-2:], jnp.float32), k, v, rows)
        return attention.attention(q, full, rows, **how), cache

    def recur(layer, inputs, g, beta, weights, cache):
        first, count = jnp.arange(B) * T, jnp.full(B, T)
        by_slot = recurrent_rows.SlotRows(first, jnp.zeros_like(first), count, count)
        before = recurrent_rows.empty(B, 0, config.kept[layer], jnp.float32)
        out, _ = recurrent_rows.read(before, by_slot, jnp.repeat(jnp.arange(B), T), inputs, g, beta, weights)
        return out, cache

    h, _ = decoder.hidden(params, config, tokens.reshape(-1), rows.position, attend, (), recur=recur)
    return decoder.logits(params, config, h).reshape(B, T, -1)


ARMS = {"dense": dense_arm, "packed": packed_arm, "paged": paged_arm}


def gap(family: str, config: ModelConfig, params: dict, arm: Callable = dense_arm) -> tuple[float, int]:
    """Largest absolute difference of our scores from the golden ones, and at how many places the best token differs."""
    tokens, theirs = golden(family)
    ours = np.asarray(arm(config, params, jnp.asarray(tokens)))
    return float(np.abs(ours - theirs).max()), int((ours.argmax(-1) != theirs.argmax(-1)).sum())


# ---- Planted faults: (config, params) -> (config, params)


def field(**changes) -> Callable:
    """A setting read wrong."""
    return lambda config, params: (dataclasses.replace(config, **changes), params)


def swapped(one: str, other: str) -> Callable:
    """Two tensors in each other's place, in every layer that has them."""
    return layers_with(one, lambda layer: {one: layer[other], other: layer[one]})


def layers_with(name: str, change: Callable) -> Callable:
    """Every layer that has a tensor of this name with what `change` returns."""

    def changed(layer: dict) -> dict:
        return {**layer, **change(layer)} if name in layer else layer

    return lambda config, params: (
        config,
        {**params, "layers": {index: changed(layer) for index, layer in params["layers"].items()}},
    )


def neutral(name: str, value: float) -> Callable:
    """A tensor forgotten, in every layer that has it."""
    return layers_with(name, lambda layer: {name: np.full_like(layer[name], value)})


def window(by: int) -> Callable:
    """Every window off by `by`."""
    return lambda config, params: (
        dataclasses.replace(config, windows=tuple(None if size is None else size + by for size in config.windows)),
        params,
    )


def windows_reversed(config: ModelConfig, params: dict):
    return dataclasses.replace(config, windows=config.windows[::-1]), params


def windows_elsewhere(config: ModelConfig, params: dict):
    """Layers with and without a window the wrong way round."""
    size = max(filter(None, config.windows))
    return dataclasses.replace(config, windows=tuple(size if w is None else None for w in config.windows)), params


def heads_interleaved(config: ModelConfig, params: dict):
    """Rotated pairs taken for neighbours."""
    half = config.head_dim // 2
    order = np.arange(config.head_dim).reshape(2, half).T.reshape(-1)
    return config, {
        **params,
        "layers": {
            index: {**layer, "q": layer["q"][..., order], "k": layer["k"][..., order]}
            for index, layer in params["layers"].items()
        },
    }


def kv_heads_reversed(config: ModelConfig, params: dict):
    """Groups of query heads at the wrong key heads."""
    return config, {
        **params,
        "layers": {
            index: {**layer, "k": layer["k"][:, ::-1], "v": layer["v"][:, ::-1]}
            for index, layer in params["layers"].items()
        },
    }


def unscaled_embedding(config: ModelConfig, params: dict):
    return dataclasses.replace(config, embed_scale=1.0), params


class Computed(NamedTuple):
    """A mistake of the computation, which no setting or weight makes: `wrong(right, *arguments)` for a module's function."""

    module: Any
    name: str
    wrong: Callable


def of_experts(**changes) -> Callable:
    """A setting of the experts read wrong."""
    return lambda config, params: (dataclasses.replace(config, experts=config.experts._replace(**changes)), params)


def more_ranks(by: int) -> Callable:
    return lambda config, params: of_experts(per_token=config.experts.per_token + by)(config, params)


def sigmoids(right: Callable, scores, ids, e):
    """Gates of another kind of router."""
    picked = jax.nn.sigmoid(jnp.take_along_axis(scores, ids, axis=-1))
    return picked / picked.sum(-1, keepdims=True) if e.renormalised else picked


def columns_in_halves(layer: dict) -> dict:
    """The columns of gate and up, which take turns in the file, taken for all of one before all of the other."""
    both = np.stack([layer["experts_gate"], layer["experts_up"]], axis=-1)
    halves = both.reshape(*both.shape[:2], -1)
    return dict(zip(("experts_gate", "experts_up"), np.split(halves, 2, axis=-1)))


def inner(
    *, more: float = 1.0, alpha: float = 1.702, lowest_gate: float = -np.inf, lowest_up: float = -1.0
) -> Computed:
    """gpt-oss's inner product with a limit of 1, and one number of it wrong."""

    def wrong(right: Callable, gate, up, limit, activation):
        gate, up = jnp.clip(gate, lowest_gate, 1.0), jnp.clip(up, lowest_up, 1.0)
        return (up + more) * gate * jax.nn.sigmoid(alpha * gate)

    return Computed(experts, "inner", wrong)


def sinks_kept(right: Callable, positions):
    """The sink's share given to the first token's value, and not dropped."""
    attend = right(positions)

    def kept(layer, q, k, v, cache, **how):
        out, cache = attend(layer, q, k, v, cache, **how)
        others, _ = attend(layer, q, k, jnp.ones_like(v), cache, **how)
        return out + (1 - others) * jnp.repeat(v[:, :1], q.shape[2] // v.shape[2], axis=2), cache

    return kept


def yarn(**changes) -> Callable:
    """The rule that stretches rotations read wrong."""
    return lambda config, params: (
        dataclasses.replace(config, rope_scaling=config.rope_scaling._replace(**changes)),
        params,
    )


def outside(name: str, change: Callable) -> Callable:
    """A tensor outside of the layers as `change(config, leaf)` returns it."""
    return lambda config, params: (config, {**params, name: change(config, params[name])})


def whole(**changes) -> Callable:
    """Layers without a window read wrong."""
    return lambda config, params: (dataclasses.replace(config, full=config.full._replace(**changes)), params)


def routers_elsewhere(config: ModelConfig, params: dict):
    """Each layer with the router of the next that has one."""
    own = [index for index, layer in params["layers"].items() if "router" in layer]
    next_one = dict(zip(own, own[1:] + own[:1]))
    moved = {
        at: {**params["layers"][at], "router": params["layers"][other]["router"]} for at, other in next_one.items()
    }
    return config, {**params, "layers": {**params["layers"], **moved}}


def kind_of(index: str, other: str) -> Callable:
    """A layer with the feed-forward of another: experts for one feed-forward, or one for experts."""

    def change(config: ModelConfig, params: dict):
        layers, attention = params["layers"], ("attn_norm", "ffw_norm", "q", "k", "v", "o", "q_norm", "k_norm")
        own = {name: leaf for name, leaf in layers[index].items() if name in attention}
        taken = {name: leaf for name, leaf in layers[other].items() if name not in attention}
        dense = set(config.experts.dense_layers) - {int(index)} | ({int(index)} if "gate" in taken else set())
        config, _ = of_experts(dense_layers=tuple(sorted(dense)))(config, params)
        return config, {**params, "layers": {**layers, index: own | taken}}

    return change


def gates_behind_all_queries(layer: dict) -> dict:
    """The columns of queries and gates, which take turns by head, taken for all queries before all gates."""
    embed, heads, both = layer["q"].shape
    return {"q": np.moveaxis(layer["q"].reshape(embed, 2, heads, both // 2), 1, 2).reshape(embed, heads, both)}


def products_behind_one_another(layer: dict) -> dict:
    """The rows of a tensor that lie by key head taken for those of all queries, then keys, values and gates."""
    names = [f"linear_{name}" for name in "qkvz"]
    heads, embed = layer["linear_q"].shape[1], len(layer["linear_q"])
    by_head = np.concatenate([layer[name].reshape(embed, heads, -1) for name in names], axis=-1).reshape(embed, -1)
    parts = np.split(by_head, np.cumsum([layer[name][0].size for name in names])[:-1], axis=-1)
    return {name: part.reshape(layer[name].shape) for name, part in zip(names, parts, strict=True)}


def key_heads_in_turn(right: Callable, convolved, g, beta):
    """Value head n with key head n modulo their number, and not with that of its group."""
    times = convolved.v.shape[-2] // convolved.k.shape[-2]
    q, k = (jnp.concatenate([x] * times, axis=-2) for x in (convolved.q, convolved.k))
    return right(convolved._replace(q=q, k=k), g, beta)


def convolutions(change: Callable) -> Callable:
    """The weights of every convolution, of which those of the last place are the token's own, read wrong."""
    return layers_with("conv_q", lambda layer: {f"conv_{name}": change(layer[f"conv_{name}"]) for name in "qkv"})


NORMS = {"norms_swapped": swapped("attn_norm", "ffw_norm")}
SCALED = RopeScaling("llama3", 8.0, 1.0, 4.0, 16)
POSTS = {
    "post_norms_swapped": swapped("attn_post_norm", "ffw_post_norm"),
    "norm_before_and_after_swapped": swapped("ffw_norm", "attn_post_norm"),
    "norm_offset_off": field(norm_offset=0.0),
    "embedding_unscaled": unscaled_embedding,
    "query_scale_of_head_dim": field(query_scale=None),
    "activation_silu": field(activation="silu"),
    "activation_not_approximate": field(activation="gelu"),
    "window_one_longer": window(1),
    "window_one_shorter": window(-1),
    "windows_elsewhere": windows_elsewhere,
}
MATRICES = ("experts_gate", "experts_up", "experts_down")
GATE_AND_UP = swapped("experts_gate", "experts_up")
EXPERTS = NORMS | {
    "experts_without_their_weights": Computed(experts, "gates", lambda right, scores, ids, e: jnp.ones(ids.shape)),
    "weights_of_other_ranks": Computed(experts, "gates", lambda right, *given: right(*given)[..., ::-1]),
    "sigmoids_for_the_softmax": Computed(experts, "gates", sigmoids),
    "one_rank_fewer": more_ranks(-1),
    "one_rank_more": more_ranks(1),
    "expert_one_on": layers_with("router", lambda layer: {name: np.roll(layer[name], 1, axis=0) for name in MATRICES}),
    "routers_elsewhere": routers_elsewhere,
}
# Where chosen scores go through the softmax, gates are renormalised. Else top-k comes behind the softmax.
SOFTMAX_OVER_ALL, SOFTMAX_OVER_THE_CHOSEN = of_experts(renormalised=False), of_experts(renormalised=True)
FAULTS: dict[str, dict[str, Callable | Computed]] = {
    "llama2": NORMS
    | {
        "rope_theta_default": field(rope_theta=10000.0),
        "heads_interleaved": heads_interleaved,
        "kv_heads_reversed": kv_heads_reversed,
    },
    "llama3": NORMS
    | {
        "rope_scaling_off": field(rope_scaling=None),
        "kv_heads_reversed": kv_heads_reversed,
        "rope_scaling_linear": field(rope_scaling=RopeScaling("linear", 8.0)),
        "rope_blend_off": field(rope_scaling=SCALED._replace(high_frequency_factor=1.0001)),
        "original_length_off": field(rope_scaling=SCALED._replace(original_length=64)),
    },
    "qwen2": NORMS
    | {
        "q_bias_dropped": neutral("q_bias", 0),
        "k_bias_dropped": neutral("k_bias", 0),
        "v_bias_dropped": neutral("v_bias", 0),
        "window_one_longer": window(1),
        "window_one_shorter": window(-1),
        "windows_reversed": windows_reversed,
        "windows_off": field(windows=()),
    },
    "qwen3": NORMS
    | {
        "q_and_k_norm_swapped": swapped("q_norm", "k_norm"),
        "q_norm_dropped": neutral("q_norm", 1),
        "k_norm_dropped": neutral("k_norm", 1),
    },
    "mistral": NORMS
    | {"window_one_longer": window(1), "window_one_shorter": window(-1), "windows_off": field(windows=())},
    "gemma2": POSTS
    | {"attn_soft_cap_off": field(attn_soft_cap=None), "final_soft_cap_off": field(final_soft_cap=None)},
    "gemma3": POSTS
    | {
        "q_and_k_norm_swapped": swapped("q_norm", "k_norm"),
        "rope_scaling_off": field(rope_scaling=None),
        "local_rope_theta_off": field(local_rope_theta=None),
        "local_theta_everywhere": field(rope_theta=50.0),
    },
    "gemma4": {name: fault for name, fault in POSTS.items() if name not in ("norm_offset_off", "windows_elsewhere")}
    | {
        "norms_of_one_more": field(norm_offset=1.0),
        "values_not_normed": field(v_norm=False),
        "layer_scalars_dropped": neutral("layer_scalar", 1),
        "final_soft_cap_off": field(final_soft_cap=None),
        "local_theta_everywhere": field(rope_theta=20.0),
        "every_pair_turns": whole(turned=1.0),
        "no_pair_turns": whole(turned=0.0),
        "q_and_k_norm_swapped": swapped("q_norm", "k_norm"),
    },
    "gemma4_embeds": {
        "left_out": neutral("layer_up", 0),
        "rows_of_the_next_layer": outside("layer_embed", lambda c, leaf: np.roll(leaf, c.layer_embeds, axis=1)),
        "rows_left_out": outside("layer_embed", lambda c, leaf: np.zeros_like(leaf)),
        "rows_not_scaled": outside("layer_embed", lambda c, leaf: leaf * c.layer_embeds**-0.5),
        "layers_not_together": outside(
            "layer_embed", lambda c, leaf: leaf.reshape(-1, c.layer_embeds, c.layers).swapaxes(1, 2).reshape(leaf.shape)
        ),
        "product_left_out": outside("layer_proj_norm", lambda c, leaf: np.zeros_like(leaf)),
        "product_of_the_next_layer": outside("layer_proj", lambda c, leaf: np.roll(leaf, 1, axis=1)),
        "weights_of_the_norm_left_out": outside("layer_proj_norm", lambda c, leaf: np.ones_like(leaf)),
        "norms_swapped": swapped("layer_post_norm", "ffw_post_norm"),
        "layer_scalars_dropped": neutral("layer_scalar", 1),
        "activation_silu": field(activation="silu"),
        "embedding_unscaled": unscaled_embedding,
    },
    "gemma4_moe": EXPERTS
    | {
        "gate_and_up_swapped": GATE_AND_UP,
        "feed_forward_left_out": neutral("down", 0),
        "experts_left_out": neutral("experts_down", 0),
        "gates_not_scaled": neutral("expert_scale", 1),
        "router_scale_dropped": neutral("router_scale", 1),
        "norms_before_swapped": swapped("ffw_norm", "moe_norm"),
        "norms_behind_swapped": swapped("dense_post_norm", "moe_post_norm"),
        "norm_of_the_sum_swapped": swapped("ffw_post_norm", "moe_post_norm"),
        "norms_of_one_more": field(norm_offset=1.0),
    },
    "qwen3_5": NORMS
    | {
        "norm_offset_off": field(norm_offset=0.0),
        "norm_of_states_with_one_more": layers_with(
            "linear_norm", lambda layer: {"linear_norm": layer["linear_norm"] + 1}
        ),
        "every_pair_turns": field(rotary_dim=None),
        "q_and_k_norm_swapped": swapped("q_norm", "k_norm"),
        "queries_and_gates_swapped": layers_with("q", lambda layer: {"q": np.roll(layer["q"], 16, axis=-1)}),
        "gates_behind_all_queries": layers_with("q", gates_behind_all_queries),
        "gates_without_a_sigmoid": Computed(jax.nn, "sigmoid", lambda right, x: jnp.ones_like(x)),
        "queries_and_keys_swapped": swapped("linear_q", "linear_k"),
        "key_heads_in_turn": Computed(gated_delta, "keyed", key_heads_in_turn),
        "rates_and_decays_swapped": swapped("linear_rate", "linear_decay"),
        "dt_bias_dropped": neutral("dt_bias", 0),
        "a_log_dropped": neutral("a_log", 0),
        "nothing_decays": neutral("a_log", -1e9),
        "convolution_backwards": convolutions(lambda weights: weights[::-1]),
        "convolution_one_earlier": convolutions(lambda weights: np.roll(weights, 1, axis=0)),
        "channels_of_queries_and_keys_swapped": swapped("conv_q", "conv_k"),
        "outputs_gated_by_other_heads": layers_with("linear_z", lambda layer: {"linear_z": layer["linear_z"][:, ::-1]}),
    },
    "qwen3_5_moe": EXPERTS
    | {
        "gate_and_up_swapped": GATE_AND_UP,
        "not_renormalised": SOFTMAX_OVER_ALL,
        "shared_left_out": neutral("shared_down", 0),
        "norm_offset_off": field(norm_offset=0.0),
        "every_pair_turns": field(rotary_dim=None),
        "queries_and_keys_swapped": swapped("linear_q", "linear_k"),
    },
    "qwen3_next": EXPERTS
    | {
        "gate_and_up_swapped": GATE_AND_UP,
        "softmax_behind_top_k": SOFTMAX_OVER_THE_CHOSEN,
        "shared_left_out": neutral("shared_down", 0),
        "every_pair_turns": field(rotary_dim=None),
        "queries_and_keys_swapped": swapped("linear_q", "linear_k"),
        "key_heads_behind_one_another": layers_with("linear_q", products_behind_one_another),
        "rates_and_decays_swapped": swapped("linear_rate", "linear_decay"),
    },
    "qwen2_moe": EXPERTS
    | {
        "gate_and_up_swapped": GATE_AND_UP,
        "softmax_behind_top_k": SOFTMAX_OVER_THE_CHOSEN,
        "shared_without_its_sigmoid": Computed(jax.nn, "sigmoid", lambda right, x: jnp.ones_like(x)),
        "shared_left_out": neutral("shared_down", 0),
        "shared_gate_and_up_swapped": swapped("shared_gate", "shared_up"),
        "windows_reversed": windows_reversed,
        "q_bias_dropped": neutral("q_bias", 0),
    },
    "qwen3_moe": EXPERTS
    | {
        "gate_and_up_swapped": GATE_AND_UP,
        "not_renormalised": SOFTMAX_OVER_ALL,
        "dense_layer_with_experts": kind_of("0", "1"),
        "layer_with_experts_dense": kind_of("1", "0"),
        "q_and_k_norm_swapped": swapped("q_norm", "k_norm"),
    },
    "mixtral": EXPERTS
    | {
        "w1_and_w3_swapped": GATE_AND_UP,
        "softmax_over_all_experts": SOFTMAX_OVER_ALL,
        "window_one_longer": window(1),
        "windows_off": field(windows=()),
    },
    "gpt_oss": EXPERTS
    | {
        "gate_and_up_swapped": GATE_AND_UP,
        "gate_and_up_in_halves": layers_with("experts_gate", columns_in_halves),
        "softmax_over_all_experts": SOFTMAX_OVER_ALL,
        "clipped_at_half": of_experts(limit=0.5),
        "silu_without_a_limit": of_experts(limit=None),
        "up_without_one_more": inner(more=0.0),
        "up_clipped_on_one_side": inner(lowest_up=-np.inf),
        "gate_clipped_on_both_sides": inner(lowest_gate=-1.0),
        "gate_in_the_sigmoid_unscaled": inner(alpha=1.0),
        "router_bias_dropped": neutral("router_bias", 0),
        "gate_bias_dropped": neutral("experts_gate_bias", 0),
        "up_bias_dropped": neutral("experts_up_bias", 0),
        "down_bias_dropped": neutral("experts_down_bias", 0),
        "o_bias_dropped": neutral("o_bias", 0),
        "q_bias_dropped": neutral("q_bias", 0),
        "sinks_dropped": neutral("sinks", -1e9),
        "sinks_kept_in_the_output": Computed(sys.modules[__name__], "dense", sinks_kept),
        "sinks_scaled_like_scores": layers_with("sinks", lambda layer: {"sinks": layer["sinks"] * 8**-0.5}),
        "sinks_of_other_heads": layers_with("sinks", lambda layer: {"sinks": layer["sinks"][::-1]}),
        "windows_elsewhere": windows_elsewhere,
        "window_one_longer": window(1),
        "yarn_truncated": yarn(truncate=True),
        "yarn_off": field(rope_scaling=None),
        "yarn_without_its_turn_scale": yarn(attention_factor=1.0),
    },
}


def wronged(change: Computed):
    """The context in which a function of a module makes its mistake."""
    right = getattr(change.module, change.name)
    return mock.patch.object(change.module, change.name, lambda *given, **more: change.wrong(right, *given, **more))


def planted(family: str, fault: str) -> tuple[float, int]:
    """`gap` of the golden checkpoint with one fault in it."""
    change, read = FAULTS[family][fault], hf.load(GOLDENS / family)
    if not isinstance(change, Computed):
        return gap(family, *change(*read))
    with wronged(change):
        return gap(family, *read)
