"""One decoder-only transformer. Its families (Llama, Qwen, Mistral, Gemma) are fields of `ModelConfig`.

Outside this file `params` is a plain nested dict of arrays:
- embed [V,D], final_norm [D], and head [D,V] unless tied
- layers: {"0": {...}, ...}, where each layer holds
  - attn_norm [D], q [D,N,H], k and v [D,K,H], o [N,H,D]
  - ffw_norm [D], gate and up [D,F], down [F,D]
  - by the config: q_bias [N,H], k_bias and v_bias [K,H], q_norm and k_norm [H], attn_post_norm and ffw_post_norm [D]

Invariant: apart from `attend`, a row (one token at one position) is computed from that row alone. So its value cannot
depend on the other rows of the batch. Norms, rotation and scores are computed in float32 or wider. Cache, mask and
pages belong to the caller's `attend`.
"""

from __future__ import annotations

import functools
import math
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Float, Int

from jaxrl_post.models import layer_loop
from jaxrl_post.models.layer_loop import PROJECTED, STREAM, named
from jaxrl_post.parallel import pieces

ACTIVATIONS: dict[str, Callable] = {
    "silu": jax.nn.silu,
    "gelu_tanh": functools.partial(jax.nn.gelu, approximate=True),
    "gelu": functools.partial(jax.nn.gelu, approximate=False),
}


_DRAWN = 1 << 24  # random numbers that are drawn at once
NOT_ALLOWED = -1e30  # score of an id without a meaning: its probability is exactly 0, and no 0 * inf arises


class RopeScaling(NamedTuple):
    """The rule that stretches rotation frequencies for longer texts.

    - "linear" divides all frequencies by `factor`.
    - "llama3" (Llama 3.1, arXiv 2407.21783) divides only those of long wavelengths. Between original_length/high and
      original_length/low it blends.
    """

    kind: str
    factor: float
    low_frequency_factor: float = 1.0
    high_frequency_factor: float = 4.0
    original_length: int = 8192


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """Shape and variant of a decoder.

    - ffw: hidden width of the gated feed-forward.
    - windows: one entry per layer, the number of latest positions that a token sees (itself included) or None for all.
      Empty: None everywhere.
    - query_scale: factor of q.k; None means head_dim ** -0.5.
    - attn_soft_cap, final_soft_cap: None, or c in c * tanh(x / c).
    - local_rope_theta: None, or layers with a window rotate by this theta, unscaled (Gemma 3, arXiv 2503.19786).
    - norm_offset: 1.0 makes norms multiply by 1 + weight (Gemma).
    - post_norms: the outputs of attention and feed-forward are normed before they are added to the stream (Gemma).
    - embed_scale: factor of the embedded tokens, rounded to the dtype of the computation (Gemma).
    - family: the family that it was read as (models/families.py), used when it is written. It changes no computation.
    """

    vocab_size: int
    embed: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    ffw: int
    max_length: int
    rope_theta: float = 10000.0
    rope_scaling: RopeScaling | None = None
    local_rope_theta: float | None = None
    norm_eps: float = 1e-5
    norm_offset: float = 0.0
    post_norms: bool = False
    embed_scale: float = 1.0
    activation: str = "silu"
    tied: bool = False
    windows: tuple[int | None, ...] = ()
    attn_soft_cap: float | None = None
    final_soft_cap: float | None = None
    used_vocab: int = 0  # ids from here on have rows but no meaning, and are never sampled; 0: no such ids
    qk_norm: bool = False
    qkv_bias: bool = False
    query_scale: float | None = None
    family: str = field(default="", compare=False)

    def __post_init__(self):
        object.__setattr__(self, "windows", tuple(self.windows) or (None,) * self.layers)
        for name in ("vocab_size", "embed", "layers", "heads", "kv_heads", "head_dim", "ffw", "max_length"):
            if getattr(self, name) < 1:
                raise ValueError(f"model: {name} must be at least 1, got {getattr(self, name)}")
        if self.heads % self.kv_heads:
            raise ValueError(f"model: heads={self.heads} must be a multiple of kv_heads={self.kv_heads}")
        if self.head_dim % 2:
            raise ValueError(
                f"model: head_dim={self.head_dim} must be even, because rotation works on pairs; nearest "
                f"valid value is {self.head_dim + 1}"
            )
        if len(self.windows) != self.layers:
            raise ValueError(
                f"model: windows has {len(self.windows)} entries, expected one for each of {self.layers} "
                f"layers, or none"
            )
        if any(window is not None and window < 1 for window in self.windows):
            raise ValueError(f"model: every window must be None or at least 1, got {self.windows}")
        if self.activation not in ACTIVATIONS:
            raise ValueError(f"model: activation={self.activation!r} is not one of {', '.join(ACTIVATIONS)}")
        if self.rope_scaling is not None and self.rope_scaling.kind not in ("linear", "llama3"):
            raise ValueError(f"model: rope_scaling.kind={self.rope_scaling.kind!r} is not one of linear, llama3")

    @property
    def scale(self) -> float:
        """Returns the factor of q.k."""
        return self.head_dim**-0.5 if self.query_scale is None else self.query_scale


def frequencies(config: ModelConfig, layer: int) -> np.ndarray:
    """Returns float64[H/2]: the scaled angle per position of each rotated pair (rotary, arXiv 2104.09864 eq. 15)."""
    steps = np.arange(0, config.head_dim, 2, dtype=np.float64) / config.head_dim
    local = config.local_rope_theta is not None and config.windows[layer] is not None
    base = (config.local_rope_theta if local else config.rope_theta) ** -steps
    scaling = config.rope_scaling
    if scaling is None or local:
        return base
    if scaling.kind == "linear":
        return base / scaling.factor
    turns = scaling.original_length * base / (2 * np.pi)
    low, high = scaling.low_frequency_factor, scaling.high_frequency_factor
    kept = np.clip((turns - low) / (high - low), 0.0, 1.0)
    return base * (kept + (1 - kept) / scaling.factor)


def _wide(x: Array) -> Array:
    return x.astype(jnp.promote_types(x.dtype, jnp.float32))


def _norm(x: Array, weight: Array, config: ModelConfig) -> Array:
    """Returns the root-mean-square norm over the last axis (arXiv 1910.07467 eq. 4) in x's dtype.

    It is computed in float32 or wider.
    """
    wide = _wide(x)
    unit = wide * jax.lax.rsqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + config.norm_eps)
    return (unit * (weight.astype(wide.dtype) + config.norm_offset)).astype(x.dtype)


def _rotate(x: Array, cos: Array, sin: Array) -> Array:
    """Rotates pair (i, i + H/2) of each head: x [..., heads, H], cos and sin [..., H/2]."""
    a, b = jnp.split(_wide(x), 2, axis=-1)
    cos, sin = cos[..., None, :], sin[..., None, :]
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1).astype(x.dtype)


def _param(shape: tuple[int, ...], axes: tuple[str | None, ...], *, std: float = 0.0, mean: float = 0.0) -> nnx.Param:
    return nnx.Param(jax.ShapeDtypeStruct(shape, jnp.float32), axes=axes, std=std, mean=mean)


class Layer(nnx.Module):
    """Attention and gated feed-forward, each added to the stream.

    The input of each is normed. Where the config says so, the output is normed too.
    """

    def __init__(self, config: ModelConfig, index: int):
        c = config
        self.config, self.index = config, index
        one, into, out = 1.0 - c.norm_offset, c.embed**-0.5, (2 * c.layers) ** -0.5
        self.attn_norm = _param((c.embed,), (None,), mean=one)
        self.q = _param((c.embed, c.heads, c.head_dim), ("embed", "heads", "head_dim"), std=into)
        self.k = _param((c.embed, c.kv_heads, c.head_dim), ("embed", "kv_heads", "head_dim"), std=into)
        self.v = _param((c.embed, c.kv_heads, c.head_dim), ("embed", "kv_heads", "head_dim"), std=into)
        self.o = _param(
            (c.heads, c.head_dim, c.embed), ("heads", "head_dim", "embed"), std=out * (c.heads * c.head_dim) ** -0.5
        )
        if c.qkv_bias:
            self.q_bias = _param((c.heads, c.head_dim), ("heads", "head_dim"))
            self.k_bias = _param((c.kv_heads, c.head_dim), ("kv_heads", "head_dim"))
            self.v_bias = _param((c.kv_heads, c.head_dim), ("kv_heads", "head_dim"))
        if c.qk_norm:
            self.q_norm = _param((c.head_dim,), (None,), mean=one)
            self.k_norm = _param((c.head_dim,), (None,), mean=one)
        if c.post_norms:
            self.attn_post_norm = _param((c.embed,), (None,), mean=one)
            self.ffw_post_norm = _param((c.embed,), (None,), mean=one)
        self.ffw_norm = _param((c.embed,), (None,), mean=one)
        self.gate = _param((c.embed, c.ffw), ("embed", "ffw"), std=into)
        self.up = _param((c.embed, c.ffw), ("embed", "ffw"), std=into)
        self.down = _param((c.ffw, c.embed), ("ffw", "embed"), std=out * c.ffw**-0.5)

    def __call__(self, h: Array, turn: tuple[Array, Array], attend: Callable, cache: Any) -> tuple[Array, Any]:
        """Returns the stream after this layer, and the cache.

        h is [..., D]. turn holds cosines and sines, [..., H/2] each.
        """
        c, dtype = self.config, h.dtype
        h = named(h, STREAM)
        with jax.named_scope("qkv"):
            q, k, v = self._qkv(_norm(h, self.attn_norm[...], c), turn)
        with jax.named_scope("attend"):
            out, cache = attend(
                self.index, q, k, v, cache, scale=c.scale, window=c.windows[self.index], soft_cap=c.attn_soft_cap
            )
            out = named(jnp.einsum("...nh,nhd->...d", out.astype(dtype), self.o[...].astype(dtype)), PROJECTED)
            h = h + (_norm(out, self.attn_post_norm[...], c) if c.post_norms else out)
        with jax.named_scope("ffw"):
            x = _norm(h, self.ffw_norm[...], c)
            gate = named(jnp.einsum("...d,df->...f", x, self.gate[...].astype(dtype)), PROJECTED)
            up = named(jnp.einsum("...d,df->...f", x, self.up[...].astype(dtype)), PROJECTED)
            inner = ACTIVATIONS[c.activation](gate) * up
            out = named(jnp.einsum("...f,fd->...d", inner, self.down[...].astype(dtype)), PROJECTED)
            h = h + (_norm(out, self.ffw_post_norm[...], c) if c.post_norms else out)
        return h, cache

    def _qkv(self, x: Array, turn: tuple[Array, Array]) -> tuple[Array, Array, Array]:
        c, dtype = self.config, x.dtype
        q = named(jnp.einsum("...d,dnh->...nh", x, self.q[...].astype(dtype)), PROJECTED)
        k = named(jnp.einsum("...d,dkh->...kh", x, self.k[...].astype(dtype)), PROJECTED)
        v = named(jnp.einsum("...d,dkh->...kh", x, self.v[...].astype(dtype)), PROJECTED)
        if c.qkv_bias:
            q = q + self.q_bias[...].astype(dtype)
            k = k + self.k_bias[...].astype(dtype)
            v = v + self.v_bias[...].astype(dtype)
        if c.qk_norm:
            q, k = _norm(q, self.q_norm[...], c), _norm(k, self.k_norm[...], c)
        return _rotate(q, *turn), _rotate(k, *turn), v


class Decoder(nnx.Module):
    """The whole stack of layers. It is built without arrays (shapes only); the functions below merge the weights in."""

    def __init__(self, config: ModelConfig):
        c = config
        self.config = config
        # Rows of the table instead of a one-hot product, which was slower on CPU at every vocabulary tried
        # (scripts/results/choices.json, by scripts/bench.py choices).
        self.embed = _param((c.vocab_size, c.embed), ("vocab", "embed"), std=c.embed**-0.5)
        self.layers = nnx.Dict({str(index): Layer(config, index) for index in range(c.layers)})
        self.final_norm = _param((c.embed,), (None,), mean=1.0 - c.norm_offset)
        if not c.tied:
            self.head = _param((c.embed, c.vocab_size), ("embed", "vocab"), std=c.embed**-0.5)

    def hidden(
        self, tokens: Array, positions: Array, attend: Callable, cache: Any, dtype: Any, how: layer_loop.LayerLoop
    ):
        with jax.named_scope("embed"):
            h = jnp.asarray(self.embed[...])[tokens].astype(dtype)
            if self.config.embed_scale != 1.0:
                h = h * jnp.asarray(self.config.embed_scale, dtype)
        with jax.named_scope("rope"):
            turns = _turns(self.config, positions, jnp.promote_types(dtype, jnp.float32))
        layers = [self.layers[str(index)] for index in range(self.config.layers)]
        h, cache = layer_loop.run(layers, h, turns, self.config.windows, attend, cache, how)
        with jax.named_scope("final_norm"):
            return _norm(h, self.final_norm[...], self.config), cache

    def logits(self, h: Array) -> Array:
        with jax.named_scope("head"):
            wide = jnp.promote_types(h.dtype, jnp.float32)
            if self.config.tied:
                out = jnp.einsum("...d,vd->...v", h, self.embed[...].astype(h.dtype), preferred_element_type=wide)
            else:
                out = jnp.einsum("...d,dv->...v", h, self.head[...].astype(h.dtype), preferred_element_type=wide)
            cap, used = self.config.final_soft_cap, self.config.used_vocab
            out = out if cap is None else cap * jnp.tanh(out / cap)
            return jnp.where(jnp.arange(out.shape[-1]) < used, out, NOT_ALLOWED) if used else out


def _turns(config: ModelConfig, positions: Array, wide: Any) -> list[tuple[Array, Array]]:
    """Returns cosines and sines of each layer, [..., H/2]. Layers with equal frequencies share theirs."""
    made: dict[bytes, tuple[Array, Array]] = {}
    keys = []
    for layer in range(config.layers):
        steps = frequencies(config, layer).astype(wide)
        keys.append(steps.tobytes())
        if keys[-1] not in made:
            angles = positions[..., None] * steps
            made[keys[-1]] = jnp.cos(angles), jnp.sin(angles)
    return [made[key] for key in keys]


@functools.lru_cache(maxsize=32)
def _skeleton(config: ModelConfig) -> tuple:
    return nnx.split(Decoder(config))


def _leaves(config: ModelConfig, function: Callable) -> dict:
    """Returns the tree of params with `function(path, shape, metadata)` as leaves."""
    _, state = _skeleton(config)
    out: dict = {}
    for path, leaf in nnx.to_flat_state(state):
        *parents, name = path
        where = out
        for parent in parents:
            where = where.setdefault(parent, {})
        where[name] = function(path, leaf.get_value().shape, leaf.get_metadata())
    return out


def abstract(config: ModelConfig) -> dict:
    """Returns the tree of params as float32 ShapeDtypeStructs."""
    return _leaves(config, lambda path, shape, about: jax.ShapeDtypeStruct(shape, jnp.float32))


def axes(config: ModelConfig) -> dict:
    """Returns the tree of params, where each leaf is the tuple of its logical axis names.

    Names are vocab, embed, heads, kv_heads, head_dim and ffw, or None for an axis that is never sharded.
    """
    return _leaves(config, lambda path, shape, about: about["axes"])


def init(config: ModelConfig, seed: int) -> dict:
    """Returns random float32 params as host numpy, the same on every process.

    The noise of a leaf is a function of (seed, its path, its shape) alone.
    - Matrices are normal with variance 1/inputs.
    - Embedding and head have variance 1/D.
    - Matrices that write to the stream have a variance divided by 2L, so that the stream's variance does not grow with
      depth.
    - Norms multiply by 1, and biases are 0.
    """

    def draw(path, shape, about):
        return np.concatenate(list(_drawn(path, shape, about, seed)))

    return _leaves(config, draw)


def placed(config: ModelConfig, seed: int, shardings: Any) -> dict:
    """Returns the params of `init` on devices. A process keeps the pieces of its own devices alone.

    Args:
      shardings: of each leaf, a tree like params.
    """

    def draw(path, shape, about):
        home = functools.reduce(lambda tree, name: tree[name], path, shardings)
        return pieces.streamed(shape, np.float32, home, _drawn(path, shape, about, seed))

    return _leaves(config, draw)


def _drawn(path: tuple[str, ...], shape: tuple[int, ...], about: Any, seed: int) -> Iterator[np.ndarray]:
    """Returns a leaf of `init` in blocks of rows. The noise does not depend on how it is cut."""
    noise = np.random.Generator(np.random.Philox(key=[seed, zlib.crc32("/".join(path).encode())]))
    rows = max(_DRAWN // max(math.prod(shape[1:]), 1), 1)
    for start in range(0, shape[0], rows):
        block = (min(rows, shape[0] - start), *shape[1:])
        if about["std"]:
            yield noise.standard_normal(block, dtype=np.float32) * np.float32(about["std"])
        else:
            yield np.full(block, about["mean"], np.float32)


def hidden(
    params: dict,
    config: ModelConfig,
    tokens: Int[Array, "*rows"],
    positions: Int[Array, "*rows"],
    attend: Callable,
    cache: Any,
    *,
    dtype: Any = jnp.float32,
    remat: bool = False,
    policy: str = "full",
    scan: bool = False,
    row_major: bool = False,
) -> tuple[Float[Array, "*rows D"], Any]:
    """Returns the last layer's normed output, and the cache after all calls of `attend`.

    Any leading shape works: [R], [replicas, R], [B, T].

    attend(layer, q [..., N, H], k [..., K, H], v [..., K, H], cache, *, scale, window, soft_cap) -> (out [..., N, H],
    cache). q and k are rotated by `positions`. `attend` is called once per layer, in order.
    It gives its output the name layer_loop.ATTENDED where a remat policy may keep it.

    Args:
      dtype: of the computation; params of another dtype are cast where they are used.
      remat: compute a layer again in the backward pass, from what `policy` keeps (layer_loop.POLICIES).
      scan: stack the weights of all layers and loop over them. Then `attend` gets a traced number of the layer.
      row_major: how the stacked weights lie in memory (layer_loop.LayerLoop).
    """
    graph, _ = _skeleton(config)
    how = layer_loop.LayerLoop(scan=scan, row_major=row_major, policy=policy if remat else None)
    return nnx.merge(graph, params).hidden(tokens, positions, attend, cache, dtype, how)


def logits(params: dict, config: ModelConfig, h: Float[Array, "*rows D"]) -> Float[Array, "*rows V"]:
    """Returns scores of every token, after the final soft cap: float32, or float64 for a float64 h.

    Sums run in the same dtype.
    """
    graph, _ = _skeleton(config)
    return nnx.merge(graph, params).logits(h)
