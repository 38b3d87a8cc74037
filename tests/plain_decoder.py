"""A decoder as the papers write it, for gradients in float64: one text, no packing, no caches, no chunks.

- Every expert computes every row. A row's experts are given, not chosen: near a tie, float32 and float64 could choose
  differently. Rows that did not choose an expert get it with weight 0.
- A state goes from token to token (arXiv 2412.06464 eq. 10).

Shares with models/ only the names in `params` and `config`. The rule that stretches rotations is that of tests/numpy_llama.py.
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
    h = jnp.asarray(params["embed"])[tokens] * config.embed_scale
    given = _layer_embeds(params, config, tokens, h) if config.layer_embeds else None
    lent: dict = {}  # keys and values of the latest layer of each window, for those that have none
    for index in range(config.layers):
        layer = params["layers"][str(index)]
        x = _norm(h, layer["attn_norm"], config)
        linear, window = "linear_q" in layer, config.windows[index]
        new = _delta_rule(layer, config, x) if linear else _attention(layer, config, x, window, lent)
        h = h + (_norm(new, layer["attn_post_norm"], config) if config.post_norms else new)
        new = _fed(layer, config, h, chosen.get(str(index)))
        h = h + (_norm(new, layer["ffw_post_norm"], config) if config.post_norms else new)
        if given is not None:
            new = (_activated(h @ layer["layer_gate"], config) * given[:, index]) @ layer["layer_up"]
            h = h + _norm(new, layer["layer_post_norm"], config)
        if "layer_scalar" in layer:  # a stored number, which is not trained
            h = h * jax.lax.stop_gradient(layer["layer_scalar"])
    scores = _norm(h, params["final_norm"], config) @ (params["embed"].T if config.tied else params["head"])
    scores = _capped(scores, config.final_soft_cap)
    return jnp.take_along_axis(jax.nn.log_softmax(scores[:-1]), tokens[1:, None], axis=-1)[:, 0]


def _norm(x: jax.Array, weight: Any, config: Any) -> jax.Array:
    return x / jnp.sqrt((x**2).mean(-1, keepdims=True) + config.norm_eps) * (weight + config.norm_offset)


def _capped(x: jax.Array, cap: float | None) -> jax.Array:
    return x if cap is None else cap * jnp.tanh(x / cap)


def _layer_embeds(params: Mapping, config: Any, tokens: jax.Array, h: jax.Array) -> jax.Array:
    """[T, L, P] what each layer gets of a token."""
    size = config.layer_embeds
    rows = jnp.asarray(params["layer_embed"])[tokens].reshape(len(tokens), config.layers, size) * np.sqrt(size)
    made = jnp.einsum("td,dlp->tlp", h, params["layer_proj"]) / np.sqrt(config.embed)
    return (_norm(made, params["layer_proj_norm"], config) + rows) / np.sqrt(2)


def _attention(layer: Mapping, config: Any, x: jax.Array, window: int | None, lent: dict) -> jax.Array:
    made = {n: jnp.einsum("td,dnh->tnh", x, layer[n]) + layer.get(f"{n}_bias", 0) for n in "qkv" if n in layer}
    gate = None
    if config.attn_gate:
        made["q"], gate = jnp.split(made["q"], 2, axis=-1)
    size, local = made["q"].shape[-1], window is not None and config.local_rope_theta is not None
    turning, part = config.rotary_dim or size, config.full.turned if config.full and window is None else 1.0
    steps = [frequency(config, pair, local, turning) * (pair < int(part * turning / 2)) for pair in range(turning // 2)]
    angles = jnp.arange(len(x))[:, None, None] * np.array(steps)

    def placed(name: str) -> jax.Array:
        """Queries or keys, normed and then turned."""
        one = _norm(made[name], layer[f"{name}_norm"], config) if config.qk_norm else made[name]
        pairs = one[..., : turning // 2] + 1j * one[..., turning // 2 : turning]
        pairs = pairs * (1.0 if local else turn_scale(config.rope_scaling)) * jnp.exp(1j * angles)
        return jnp.concatenate([pairs.real, pairs.imag, one[..., turning:]], axis=-1)

    if "k" in made:
        v = made.get("v", made["k"])  # values that are keys are so before norm and rotation
        lent[window] = placed("k"), _norm(v, 1 - config.norm_offset, config) if config.v_norm else v
    q, (k, v) = placed("q"), (jnp.repeat(one, config.heads // one.shape[1], axis=1) for one in lent[window])
    distance = jnp.arange(len(x))[:, None] - jnp.arange(len(x))[None, :]
    seen = (distance >= 0) & (distance < (window or len(x)))
    scale = size**-0.5 if config.query_scale is None else config.query_scale
    scores = _capped(jnp.einsum("tnh,snh->nts", q, k) * scale, config.attn_soft_cap)
    scores = jnp.where(seen, scores, -jnp.inf)
    if "sinks" in layer:
        scores = jnp.concatenate([scores, jnp.broadcast_to(layer["sinks"][:, None, None], (*scores.shape[:2], 1))], -1)
    read = jnp.einsum("nts,snh->tnh", jax.nn.softmax(scores)[..., : len(x)], v)
    read = read if gate is None else read / (1 + jnp.exp(-gate))
    return jnp.einsum("tnh,nhd->td", read, layer["o"]) + layer.get("o_bias", 0)


def _delta_rule(layer: Mapping, config: Any, x: jax.Array) -> jax.Array:
    sizes = config.linear

    def convolved(name: str) -> jax.Array:
        made = jnp.einsum("td,dhk->thk", x, layer[f"linear_{name}"])
        made = jnp.concatenate([jnp.zeros((sizes.width - 1, *made.shape[1:]), x.dtype), made])
        made = sum(made[at : at + len(x)] * layer[f"conv_{name}"][at] for at in range(sizes.width))
        return made / (1 + jnp.exp(-made))

    q, k, v = map(convolved, "qkv")
    q, k = (one / jnp.sqrt((one**2).sum(-1, keepdims=True) + 1e-6) for one in (q, k))
    q, k = (jnp.repeat(one, sizes.value_heads // sizes.key_heads, axis=1) for one in (q * sizes.key_dim**-0.5, k))
    beta = 1 / (1 + jnp.exp(-x @ layer["linear_rate"]))
    alpha = jnp.exp(-jnp.exp(layer["a_log"]) * jnp.log1p(jnp.exp(x @ layer["linear_decay"] + layer["dt_bias"])))

    def token(state: jax.Array, given: tuple) -> tuple[jax.Array, jax.Array]:
        """S = alpha S (1 - beta k k^T) + beta v k^T, and o = S q. The paper's S is [values, keys]."""
        q, k, v, alpha, beta = given
        along = jnp.einsum("hvk,hk->hv", state, k)
        state = alpha[:, None, None] * (state - beta[:, None, None] * along[..., None] * k[:, None])
        state = state + beta[:, None, None] * v[..., None] * k[:, None]
        return state, jnp.einsum("hvk,hk->hv", state, q)

    start = jnp.zeros((sizes.value_heads, sizes.value_dim, sizes.key_dim), x.dtype)
    _, read = jax.lax.scan(token, start, (q, k, v, alpha, beta))
    read = read / jnp.sqrt((read**2).mean(-1, keepdims=True) + config.norm_eps) * layer["linear_norm"]
    z = jnp.einsum("td,dhv->thv", x, layer["linear_z"])
    return jnp.einsum("thv,hvd->td", read * z / (1 + jnp.exp(-z)), layer["linear_o"])


def _fed(layer: Mapping, config: Any, h: jax.Array, chosen: jax.Array | None) -> jax.Array:
    """What a feed-forward, experts or both make of the stream."""
    x = _norm(h, layer["ffw_norm"], config)
    if "router_scale" in layer:
        scored = _norm(h, 1 - config.norm_offset, config) * layer["router_scale"] / np.sqrt(config.embed)
        more = _mixed(layer, config, _norm(h, layer["moe_norm"], config), scored, chosen)
        dense = _norm(_gated(layer, "", x, config), layer["dense_post_norm"], config)
        return dense + _norm(more, layer["moe_post_norm"], config)
    return _mixed(layer, config, x, x, chosen) if "router" in layer else _gated(layer, "", x, config)


def _activated(gate: jax.Array, config: Any) -> jax.Array:
    if config.activation == "silu":
        return gate / (1 + jnp.exp(-gate))
    assert config.activation == "gelu_tanh"
    return gate / 2 * (1 + jnp.tanh(np.sqrt(2 / np.pi) * (gate + 0.044715 * gate**3)))


def _gated(layer: Mapping, kind: str, x: jax.Array, config: Any) -> jax.Array:
    return (_activated(x @ layer[f"{kind}gate"], config) * (x @ layer[f"{kind}up"])) @ layer[f"{kind}down"]


def _mixed(layer: Mapping, config: Any, x: jax.Array, scored: jax.Array, chosen: jax.Array) -> jax.Array:
    e = config.experts
    share = jax.nn.softmax(scored @ layer["router"] + layer.get("router_bias", 0))
    share = share * jax.nn.one_hot(chosen, e.count, dtype=x.dtype).sum(1)
    share = share / share.sum(-1, keepdims=True) if e.renormalised else share
    share = share * layer.get("expert_scale", 1)
    biases = {name: layer.get(f"experts_{name}_bias", 0) for name in ("gate", "up", "down")}
    gate, up = (jnp.einsum("td,edf->tef", x, layer[f"experts_{name}"]) + biases[name] for name in ("gate", "up"))
    if e.limit is None:
        inner = _activated(gate, config) * up
    else:
        gate, up = jnp.where(gate > e.limit, e.limit, gate), jnp.maximum(jnp.minimum(up, e.limit), -e.limit)
        inner = (up + 1) * gate / (1 + jnp.exp(-1.702 * gate))
    out = jnp.einsum("te,ted->td", share, jnp.einsum("tef,efd->ted", inner, layer["experts_down"]) + biases["down"])
    if e.shared_ffw:
        opened = 1 / (1 + jnp.exp(-x @ layer["shared_router"]))
        out = out + opened[:, None] * _gated(layer, "shared_", x, config)
    return out
