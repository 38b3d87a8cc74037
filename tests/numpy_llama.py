"""An independent forward pass of Llama-family models in plain numpy: the oracle of several tests.

It is a full forward pass over one text, without cache, batch or jax. It is written from the papers, with complex numbers
for the rotation and loops over layers, heads and experts. It shares only the names in `params` and `config` with
models/decoder.py.
"""

from __future__ import annotations

import dataclasses
import math
import os

import numpy as np

# The show quantised runs the suites of the engine once more with what this names in int8: "weights", "kv" or "both".
ROUNDS = os.environ.get("LAB_BITS", "")
# Axes that the product of a matrix sums over, without the one of experts.
_SUMMED = {"q": 1, "k": 1, "v": 1, "o": 2, "gate": 1, "up": 1, "down": 1}


def forward(params, config, tokens, *, positions=None, dtype=np.float32) -> np.ndarray:
    """[T, V] scores after each of T tokens, in `dtype` (float32 or float64)."""
    tokens = np.asarray(tokens)
    positions = np.arange(tokens.size) if positions is None else np.asarray(positions)
    stream = _cast(params["embed"], dtype)[tokens] * dtype(config.embed_scale)
    given = layer_embeds(params, config, tokens, stream) if config.layer_embeds else None
    lent: dict = {}  # keys and values of the latest layer of each window, for those that have none
    for index in range(config.layers):
        layer = {name: _cast(leaf, dtype) for name, leaf in matrices(params["layers"][str(index)]).items()}
        normed = _norm(stream, layer["attn_norm"], config)
        if "linear_q" in layer:
            new = _delta_rule(layer, config, normed)
        else:
            new = _attention(layer, config, normed, positions, config.windows[index], lent)
        stream = stream + (_norm(new, layer["attn_post_norm"], config) if config.post_norms else new)
        if "router_scale" in layer:
            new = both(layer, config, stream)
        else:
            ffw = experts if "router" in layer else feed_forward
            new = ffw(layer, config, _norm(stream, layer["ffw_norm"], config))
        stream = stream + (_norm(new, layer["ffw_post_norm"], config) if config.post_norms else new)
        if given is not None:
            new = (_activated(stream @ layer["layer_gate"], config) * given[:, index]) @ layer["layer_up"]
            stream = stream + _norm(new, layer["layer_post_norm"], config)
        stream = stream * layer["layer_scalar"] if config.layer_scalars else stream
    stream = _norm(stream, _cast(params["final_norm"], dtype), config)
    head = _cast(params["embed"], dtype).T if config.tied else _cast(params["head"], dtype)
    return _capped(stream @ head, config.final_soft_cap)


def int8(x: np.ndarray, axes) -> np.ndarray:
    """`x` as whole multiples of a number of its own, 127 of them at most, for each entry of its other axes."""
    largest = np.abs(x).max(axis=axes, keepdims=True)
    unit = np.where(largest > 0, largest / x.dtype.type(127), x.dtype.type(1))
    return np.rint(x / unit) * unit


def matrices(layer) -> dict:
    """The layer's weights, its matrices in int8 where ROUNDS asks for it."""
    out = dict(layer)
    for name, leaf in layer.items() if ROUNDS in ("weights", "both") else ():
        first, short = int(name.startswith("experts_")), name.removeprefix("experts_").removeprefix("shared_")
        if short in _SUMMED:
            out[name] = int8(np.asarray(leaf), tuple(range(first, first + _SUMMED[short])))
    return out


def kept(x: np.ndarray) -> np.ndarray:
    """Keys or values [..., heads, H] as the cache keeps them."""
    return int8(x, -1) if ROUNDS in ("kv", "both") else x


def greedy(params, config, tokens, count: int, *, dtype=np.float32) -> list[int]:
    """`tokens` continued by the `count` most probable ones, each from a full forward pass."""
    tokens = list(tokens)
    for _ in range(count):
        tokens.append(int(forward(params, config, tokens, dtype=dtype)[-1].argmax()))
    return tokens


def log_softmax(scores: np.ndarray) -> np.ndarray:
    top = scores.max(-1, keepdims=True)
    return scores - top - np.log(np.exp(scores - top).sum(-1, keepdims=True))


def _cast(leaf, dtype) -> np.ndarray:
    return np.asarray(leaf).astype(dtype)


def _norm(x, weight, config) -> np.ndarray:
    return (
        x
        / np.sqrt((x**2).mean(-1, keepdims=True) + x.dtype.type(config.norm_eps))
        * (weight + x.dtype.type(config.norm_offset))
    )


def _capped(x, cap) -> np.ndarray:
    return x if cap is None else x.dtype.type(cap) * np.tanh(x / x.dtype.type(cap))


def _attention(layer, config, x, positions, window, lent) -> np.ndarray:
    local = window is not None and config.local_rope_theta is not None

    def side(name):
        source = name if name in layer else "k"  # of values that are keys
        made = np.tensordot(x, layer[source], 1)
        made = made[..., : made.shape[-1] // 2] if name == "q" and config.attn_gate else made
        made = made + layer[f"{source}_bias"] if config.qkv_bias else made
        if name == "v":
            return _norm(made, x.dtype.type(1 - config.norm_offset), config) if config.v_norm else made
        made = _norm(made, layer[f"{name}_norm"], config) if config.qk_norm else made
        return _turned(made, config, positions, local, config.full.turned if config.full and window is None else 1.0)

    q = side("q")
    if "k" in layer:
        lent[window] = kept(side("k")), kept(side("v"))
    k, v = lent[window]
    scale = x.dtype.type(q.shape[-1] ** -0.5 if config.query_scale is None else config.query_scale)
    distance = positions[:, None] - positions[None, :]
    hidden = (distance < 0) | (distance >= (window or math.inf))
    out = np.zeros_like(x)
    for head in range(config.heads):
        shared = head * k.shape[1] // config.heads
        scores = _capped(q[:, head] @ k[:, shared].T * scale, config.attn_soft_cap)
        scores = np.where(hidden, -np.inf, scores)
        if config.sinks:
            scores = np.concatenate([scores, np.full((len(scores), 1), layer["sinks"][head])], axis=1)
        weights = np.exp(log_softmax(scores))[:, : len(positions)]
        read = weights @ v[:, shared]
        if config.attn_gate:
            read = read / (1 + np.exp(-x @ layer["q"][:, head, q.shape[-1] :]))
        out += read @ layer["o"][head]
    return out + layer["o_bias"] if config.o_bias else out


def _delta_rule(layer, config, x) -> np.ndarray:
    """The gated delta rule token by token (arXiv 2412.06464 eq. 10), over convolved queries, keys and values."""
    one, sizes = x.dtype.type(1), config.linear
    before = np.zeros((sizes.width - 1, x.shape[1]), x.dtype)

    def convolved(name):
        made = np.tensordot(np.concatenate([before, x]), layer[f"linear_{name}"], 1)
        made = sum(made[at : at + len(x)] * layer[f"conv_{name}"][at] for at in range(sizes.width))
        return made / (one + np.exp(-made))

    q, k, v = map(convolved, "qkv")
    q, k = (part / np.sqrt((part**2).sum(-1, keepdims=True) + x.dtype.type(1e-6)) for part in (q, k))
    rate = one / (one + np.exp(-x @ layer["linear_rate"]))
    decay = np.exp(-np.exp(layer["a_log"]) * np.log1p(np.exp(x @ layer["linear_decay"] + layer["dt_bias"])))
    gate, out = np.tensordot(x, layer["linear_z"], 1), np.zeros_like(x)
    for head in range(sizes.value_heads):
        shared = head * sizes.key_heads // sizes.value_heads
        state = np.zeros((sizes.key_dim, sizes.value_dim), x.dtype)
        for t in range(len(x)):
            state = decay[t, head] * state
            state = state + np.outer(k[t, shared], rate[t, head] * (v[t, head] - k[t, shared] @ state))
            read = q[t, shared] @ state * x.dtype.type(sizes.key_dim**-0.5)
            read = read / np.sqrt((read**2).mean() + x.dtype.type(config.norm_eps)) * layer["linear_norm"]
            z = gate[t, head]
            out[t] += (read * z / (one + np.exp(-z))) @ layer["linear_o"][head]
    return out


def _turned(x, config, positions, local, part) -> np.ndarray:
    if config.rotary_dim:
        first = _turned(
            x[..., : config.rotary_dim], dataclasses.replace(config, rotary_dim=None), positions, local, part
        )
        return np.concatenate([first, x[..., config.rotary_dim :]], axis=-1)
    half = x.shape[-1] // 2
    angles = np.outer(
        positions, [frequency(config, i, local, x.shape[-1]) * (i < int(part * half)) for i in range(half)]
    )
    scale = 1.0 if local else turn_scale(config.rope_scaling)
    turned = (x[..., :half] + 1j * x[..., half:]) * scale * np.exp(1j * angles)[:, None, :]
    return np.concatenate([turned.real, turned.imag], -1).astype(x.dtype)


def frequency(config, i: int, local: bool, head_dim: int = 0) -> float:
    """Of pair i in heads of `head_dim`; 0: the config's."""
    theta = config.local_rope_theta if local else config.rope_theta
    plain = 1 / theta ** (2 * i / (head_dim or config.head_dim))
    if local:
        return plain
    scaling = config.rope_scaling
    if scaling is None or scaling.kind == "dynamic":
        return plain
    if scaling.kind == "linear":
        return plain / scaling.factor
    if scaling.kind == "longrope":
        longer = config.max_length > scaling.original_length
        return plain / (scaling.long_factors[i] if longer else scaling.short_factors[i])
    if scaling.kind == "yarn":
        divided = _divided_by_yarn(config, scaling, i)
        return (1 - divided) * plain + divided * plain / scaling.factor
    wavelength = 2 * math.pi / plain
    if wavelength < scaling.original_length / scaling.high_frequency_factor:
        return plain
    if wavelength > scaling.original_length / scaling.low_frequency_factor:
        return plain / scaling.factor
    smooth = (scaling.original_length / wavelength - scaling.low_frequency_factor) / (
        scaling.high_frequency_factor - scaling.low_frequency_factor
    )
    return (1 - smooth) * plain / scaling.factor + smooth * plain


def _divided_by_yarn(config, scaling, i: int) -> float:
    """The ramp of arXiv 2309.00071, over the index: pair j turns length * theta^(-2j/H) / (2 pi) times, solved for j."""
    first, last = (
        config.head_dim / 2 * math.log(scaling.original_length / (2 * math.pi * turns), config.rope_theta)
        for turns in (scaling.beta_fast, scaling.beta_slow)
    )
    if scaling.truncate:
        first, last = math.floor(first), math.ceil(last)
    first = max(first, 0)
    return 0.0 if i <= first else 1.0 if i >= last else (i - first) / (last - first)


def turn_scale(scaling) -> float:
    if scaling is None or scaling.kind not in ("yarn", "longrope"):
        return 1.0
    if scaling.attention_factor is not None:
        return scaling.attention_factor
    if scaling.kind == "yarn":
        return 1 + math.log(scaling.factor) / 10
    return math.sqrt(math.log(scaling.original_length * scaling.factor, scaling.original_length))


def both(layer, config, stream) -> np.ndarray:
    """A feed-forward and experts beside one another."""
    plain, one = _norm(stream, layer["ffw_norm"], config), stream.dtype.type(1 - config.norm_offset)
    scored = _norm(stream, one, config) * layer["router_scale"] / np.sqrt(stream.dtype.type(config.embed))
    mixed = experts(layer, config, _norm(stream, layer["moe_norm"], config), scored)
    dense = _norm(feed_forward(layer, config, plain), layer["dense_post_norm"], config)
    return dense + _norm(mixed, layer["moe_post_norm"], config)


def experts(layer, config, x, scored=None) -> np.ndarray:
    """One row and one expert at a time, as the papers write it. scored: what the router reads, where that is not x."""
    e, out = config.experts, np.zeros_like(x)
    scores = (x if scored is None else scored) @ layer["router"] + layer.get("router_bias", 0)
    for at, row in enumerate(x):
        chosen = sorted(range(e.count), key=lambda expert: (-scores[at, expert], expert))[: e.per_token]
        over = scores[at, chosen] if e.renormalised else scores[at]
        for expert in chosen:
            own = {name: layer[f"experts_{name}"][expert] for name in ("gate", "up", "down")}
            bias = {name: layer[f"experts_{name}_bias"][expert] if e.biased else 0 for name in own}
            gate, up = (row @ own[name] + bias[name] for name in ("gate", "up"))
            if e.limit is None:
                inner = _activated(gate, config) * up
            else:
                gate, up = np.minimum(gate, e.limit), np.minimum(np.maximum(up, -e.limit), e.limit)
                inner = (up + 1) * gate / (1 + np.exp(-x.dtype.type(1.702) * gate))
            share = np.exp(scores[at, expert]) / np.exp(over).sum()
            share = share * layer["expert_scale"][expert] if "expert_scale" in layer else share
            out[at] += share * (inner @ own["down"] + bias["down"])
    if e.shared_ffw:
        shared = {name: layer[f"shared_{name}"] for name in ("gate", "up", "down")}
        opened = 1 / (1 + np.exp(-(x @ layer["shared_router"])))
        out += opened[:, None] * feed_forward(shared, config, x)
    return out


def layer_embeds(params, config, tokens, stream) -> np.ndarray:
    """[T, L, P] what each layer gets of a token, one layer at a time."""
    P, out = config.layer_embeds, []
    for at in range(config.layers):
        row = _cast(params["layer_embed"], stream.dtype)[tokens, at * P : (at + 1) * P]
        made = stream @ _cast(params["layer_proj"], stream.dtype)[:, at] / np.sqrt(stream.dtype.type(config.embed))
        made = _norm(made, _cast(params["layer_proj_norm"], stream.dtype), config)
        out.append((made + row * np.sqrt(stream.dtype.type(P))) / np.sqrt(stream.dtype.type(2)))
    return np.stack(out, axis=1)


def feed_forward(layer, config, x) -> np.ndarray:
    return (_activated(x @ layer["gate"], config) * (x @ layer["up"])) @ layer["down"]


def _activated(gate, config) -> np.ndarray:
    if config.activation == "silu":
        return gate / (1 + np.exp(-gate))
    if config.activation == "gelu_tanh":
        return 0.5 * gate * (1 + np.tanh(math.sqrt(2 / math.pi) * (gate + 0.044715 * gate**3)))
    return 0.5 * gate * (1 + np.vectorize(math.erf)(gate / math.sqrt(2)))
