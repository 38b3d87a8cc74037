"""A decoder with experts as the papers write it, for gradients in float64: every expert computes every row.

A row's experts are given, not chosen: near a tie, float32 and float64 could choose differently. Rows that did not choose
an expert get it with weight 0. Shares with models/ only the names in `params` and `config`. No windows by layer kind,
soft caps or thetas by kind of layer. The rule that stretches rotations is that of tests/numpy_llama.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from numpy_llama import frequency, turn_scale


def log_probs(params: Mapping, config: Any, tokens: np.ndarray, chosen: Mapping[str, np.ndarray]) -> jax.Array:
    """[B, T-1]: of each token but the first, in the dtype of `params`. chosen: of each layer with experts int[B, T, k]."""
    return jax.vmap(lambda text, own: _text(params, config, text, own))(jnp.asarray(tokens), dict(chosen))


def _text(params: Mapping, config: Any, tokens: jax.Array, chosen: Mapping[str, jax.Array]) -> jax.Array:
    h = jnp.asarray(params["embed"])[tokens]
    for index in range(config.layers):
        layer = params["layers"][str(index)]
        h = h + _attention(layer, config, _norm(h, layer["attn_norm"], config), config.windows[index])
        x = _norm(h, layer["ffw_norm"], config)
        h = h + (_mixed(layer, config.experts, x, chosen[str(index)]) if "router" in layer else _gated(layer, "", x))
    scores = _norm(h, params["final_norm"], config) @ (params["embed"].T if config.tied else params["head"])
    return jnp.take_along_axis(jax.nn.log_softmax(scores[:-1]), tokens[1:, None], axis=-1)[:, 0]


def _norm(x: jax.Array, weight: jax.Array, config: Any) -> jax.Array:
    return x / jnp.sqrt((x**2).mean(-1, keepdims=True) + config.norm_eps) * weight


def _attention(layer: Mapping, config: Any, x: jax.Array, window: int | None) -> jax.Array:
    q, k, v = (jnp.einsum("td,dnh->tnh", x, layer[name]) + layer.get(f"{name}_bias", 0) for name in "qkv")
    if "q_norm" in layer:
        q, k = _norm(q, layer["q_norm"], config), _norm(k, layer["k_norm"], config)
    at, half = jnp.arange(len(x)), config.head_dim // 2
    angles = at[:, None, None] * np.array([frequency(config, pair, local=False) for pair in range(half)])
    turn = turn_scale(config.rope_scaling) * (jnp.cos(angles) + 1j * jnp.sin(angles))
    turned = [(one[..., :half] + 1j * one[..., half:]) * turn for one in (q, k)]
    q, k = (jnp.concatenate([one.real, one.imag], -1) for one in turned)
    k, v = (jnp.repeat(one, config.heads // config.kv_heads, axis=1) for one in (k, v))
    distance = at[:, None] - at[None, :]
    seen = (distance >= 0) & (distance < (window or len(x)))
    scores = jnp.where(seen, jnp.einsum("tnh,snh->nts", q, k) * config.head_dim**-0.5, -jnp.inf)
    if "sinks" in layer:
        scores = jnp.concatenate([scores, jnp.broadcast_to(layer["sinks"][:, None, None], (*scores.shape[:2], 1))], -1)
    weights = jax.nn.softmax(scores)[..., : len(x)]
    return jnp.einsum("nts,snh,nhd->td", weights, v, layer["o"]) + layer.get("o_bias", 0)


def _gated(layer: Mapping, kind: str, x: jax.Array) -> jax.Array:
    return (jax.nn.silu(x @ layer[f"{kind}gate"]) * (x @ layer[f"{kind}up"])) @ layer[f"{kind}down"]


def _mixed(layer: Mapping, e: Any, x: jax.Array, chosen: jax.Array) -> jax.Array:
    share = jax.nn.softmax(x @ layer["router"] + layer.get("router_bias", 0))
    share = share * jax.nn.one_hot(chosen, e.count, dtype=x.dtype).sum(1)
    share = share / share.sum(-1, keepdims=True) if e.renormalised else share
    biases = {name: layer.get(f"experts_{name}_bias", 0) for name in ("gate", "up", "down")}
    gate, up = (jnp.einsum("td,edf->tef", x, layer[f"experts_{name}"]) + biases[name] for name in ("gate", "up"))
    if e.limit is None:
        inner = jax.nn.silu(gate) * up
    else:
        gate, up = jnp.where(gate > e.limit, e.limit, gate), jnp.maximum(jnp.minimum(up, e.limit), -e.limit)
        inner = (up + 1) * gate / (1 + jnp.exp(-1.702 * gate))
    out = jnp.einsum("te,ted->td", share, jnp.einsum("tef,efd->ted", inner, layer["experts_down"]) + biases["down"])
    if e.shared_ffw:
        out = out + jax.nn.sigmoid(x @ layer["shared_router"])[:, None] * _gated(layer, "shared_", x)
    return out
