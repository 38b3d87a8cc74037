"""One decoder-only transformer. Its families (Llama, Qwen, Mistral, Gemma, gpt-oss) are fields of `ModelConfig`.

Outside this file `params` is a plain nested dict of arrays:
- embed [V,D], final_norm [D], and head [D,V] unless tied; score [D,1] in its place where the config is `scalar`
- by the config: layer_embed [V,L*P], the embeddings of each layer beside one another, layer_proj [D,L,P], layer_proj_norm [P]
- layers: {"0": {...}, ...}, where each layer holds
  - attn_norm [D], q [D,N,H], k and v [D,K,H], o [N,H,D]
  - ffw_norm [D], gate and up [D,F], down [F,D]
    or, with experts, router [D,E], experts_gate and experts_up [E,D,F], experts_down [E,F,D]
  - with experts beside the feed-forward both, and router_scale [D], expert_scale [E], dense_post_norm, moe_norm, moe_post_norm [D]
  - by the config: router_bias [E], experts_gate_bias and experts_up_bias [E,F], experts_down_bias [E,D], shared_gate and
    shared_up [D,S], shared_down [S,D], shared_router [D]
  - by the config: q_bias [N,H], k_bias and v_bias [K,H], q_norm and k_norm [H], attn_post_norm and ffw_post_norm [D],
    sinks [N], o_bias [D], layer_scalar [1], layer_gate [D,P], layer_up [P,D], layer_post_norm [D]

Where the config stores 8 bits, a matrix of a layer holds codes, and NAME_scale has a number for each of its outputs.

A layer with a gated delta rule in the place of attention has none of q, k, v and o. It has, with h key heads and N value heads:
- linear_q and linear_k [D,h,K], linear_v and linear_z [D,N,V], linear_rate and linear_decay [D,N], linear_norm [V]
- conv_q and conv_k [W,h,K], conv_v [W,N,V], dt_bias and a_log [N], linear_o [N,V,D]

K and H are the layer's own (config.kept). With `attn_gate`, q is [D,N,2H]. A layer that reads another layer's pages has no k, v,
k_bias, v_bias and k_norm. One whose values are its keys has no v and v_bias.

Invariant: apart from `attend` and `recur`, a row (one token at one position) is computed from that row alone. So its value cannot
depend on the other rows of the batch. Norms, rotation and scores are computed in float32 or wider. Cache, mask and
pages belong to the caller's `attend`.
"""

from __future__ import annotations

import functools
import math
import zlib
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx, traverse_util
from jaxtyping import Array, Float, Int

from jaxrl_post.kernels import row_blocks
from jaxrl_post.models import experts, layer_loop
from jaxrl_post.models.cache_kinds import Pages, RecurrentState
from jaxrl_post.models.layer import Layer, norm, param
from jaxrl_post.models.linear_layer import LinearLayer
from jaxrl_post.models.model_config import ModelConfig, frequencies, turn_scale
from jaxrl_post.parallel import relayout

_DRAWN = 1 << 24  # random numbers that are drawn at once
NOT_ALLOWED = -1e30  # score of an id without a meaning: its probability is exactly 0, and no 0 * inf arises


class Decoder(nnx.Module):
    """The whole stack of layers. It is built without arrays (shapes only); the functions below merge the weights in."""

    def __init__(self, config: ModelConfig):
        c = config
        self.config = config
        # Rows of the table instead of a one-hot product, which was slower on CPU at every vocabulary tried
        # (scripts/results/choices.json, by scripts/bench.py choices).
        self.embed = param((c.vocab_size, c.embed), ("vocab", "embed"), std=c.embed**-0.5)
        if P := c.layer_embeds:
            self.layer_embed = param((c.vocab_size, c.layers * P), ("vocab", "embed"), std=P**-0.5)
            self.layer_proj = param((c.embed, c.layers, P), ("embed", None, None), std=c.embed**-0.5)
            self.layer_proj_norm = param((P,), (None,), mean=1.0 - c.norm_offset)
        kinds = {Pages: Layer, RecurrentState: LinearLayer}
        self.layers = nnx.Dict({str(index): kinds[type(kept)](c, index) for index, kept in enumerate(c.kept)})
        self.final_norm = param((c.embed,), (None,), mean=1.0 - c.norm_offset)
        if c.scalar:
            self.score = param((c.embed, 1), ("embed", None))
        elif not c.tied:
            self.head = param((c.embed, c.vocab_size), ("embed", "vocab"), std=c.embed**-0.5)

    def hidden(
        self,
        tokens: Array,
        positions: Array,
        calls: layer_loop.Callbacks,
        cache: Any,
        noise: Any,
        dtype: Any,
        loop,
        rows,
    ):
        with jax.named_scope("embed"):
            h = rows(jnp.asarray(self.embed[...]), tokens, dtype)
            h = h if noise is None else h + noise.astype(dtype)
            if self.config.embed_scale != 1.0:
                h = h * jnp.asarray(self.config.embed_scale, dtype)
        given = None
        if P := self.config.layer_embeds:
            with jax.named_scope("layer_embed"):
                own = rows(jnp.asarray(self.layer_embed[...]), tokens, dtype) * jnp.asarray(P**0.5, dtype)
                made = jnp.einsum("...d,dlp->...lp", h, self.layer_proj[...].astype(dtype))
                made = norm(made * jnp.asarray(h.shape[-1] ** -0.5, dtype), self.layer_proj_norm[...], self.config)
                given = jnp.moveaxis((made + own.reshape(made.shape)) * jnp.asarray(0.5**0.5, dtype), -2, 0)
        with jax.named_scope("rope"):
            turns = rotations(self.config, positions, jnp.promote_types(dtype, jnp.float32))
        layers = [self.layers[str(index)] for index in range(self.config.layers)]
        h, cache = layer_loop.run(layers, h, turns, self.config.kept, calls, cache, loop, given)
        with jax.named_scope("final_norm"):
            return norm(h, self.final_norm[...], self.config), cache

    def logits(self, h: Array) -> Array:
        with jax.named_scope("head"):
            wide = jnp.promote_types(h.dtype, jnp.float32)
            if self.config.row_blocks is not None:
                matrix = self.embed if self.config.tied else self.head
                how = dict(turned=self.config.tied, platforms=self.config.row_blocks.platforms)
                out = row_blocks.product(h, matrix[...].astype(h.dtype), wide, **how)
            elif self.config.tied:
                out = jnp.einsum("...d,vd->...v", h, self.embed[...].astype(h.dtype), preferred_element_type=wide)
            else:
                out = jnp.einsum("...d,dv->...v", h, self.head[...].astype(h.dtype), preferred_element_type=wide)
            cap, used = self.config.final_soft_cap, self.config.used_vocab
            out = out if cap is None else cap * jnp.tanh(out / cap)
            return jnp.where(jnp.arange(out.shape[-1]) < used, out, NOT_ALLOWED) if used else out


def rotations(config: ModelConfig, positions: Array, wide: Any) -> list[tuple[Array, Array]]:
    """Returns cosines and sines of each layer, one for each rotated pair, in the dtype `wide`. Layers with equal ones share theirs."""
    made: dict[tuple[bytes, float], tuple[Array, Array]] = {}
    keys = []
    for layer in range(config.layers):
        steps, scale = frequencies(config, layer).astype(wide), turn_scale(config, layer)
        keys.append((steps.tobytes(), scale))
        if keys[-1] not in made:
            angles = positions[..., None] * steps
            turns = jnp.cos(angles), jnp.sin(angles)
            made[keys[-1]] = turns if scale == 1 else (scale * turns[0], scale * turns[1])
    return [made[key] for key in keys]


@functools.lru_cache(maxsize=32)
def _skeleton(config: ModelConfig) -> tuple:
    return nnx.split(Decoder(config))


def _leaves(config: ModelConfig, function: Callable) -> dict:
    """Returns the tree of params with `function(path, shape, metadata)` as leaves."""
    _, state = _skeleton(config)
    flat = nnx.to_flat_state(state)
    leaves = {path: function(path, leaf.get_value().shape, leaf.get_metadata()) for path, leaf in flat}
    return traverse_util.unflatten_dict(leaves)


def abstract(config: ModelConfig, dtype: Any = jnp.float32) -> dict:
    """Returns the tree of params as ShapeDtypeStructs of this dtype. Codes and their scales have their own."""
    return _leaves(config, lambda path, shape, about: jax.ShapeDtypeStruct(shape, about["own"] or dtype))


def groups(config: ModelConfig) -> list[tuple[int, ...]]:
    """Returns the numbers of the layers of each stack that is scanned."""
    layers = abstract(config)["layers"]
    shapes = [jax.tree.leaves_with_path(layers[str(at)]) for at in range(config.layers)]
    return layer_loop.groups(shapes)


def axes(config: ModelConfig) -> dict:
    """Returns the tree of params, where each leaf is the tuple of its logical axis names.

    Names are vocab, embed, heads, kv_heads, head_dim, ffw and expert, or None for an axis that is never sharded.
    """
    return _leaves(config, lambda path, shape, about: about["axes"])


def init(config: ModelConfig, seed: int) -> dict:
    """Returns random float32 params as host numpy, the same on every process.

    The noise of a leaf is a function of (seed, its path, its shape) alone.
    - Matrices are normal with variance 1/inputs.
    - Embedding and head have variance 1/D, and embeddings of each layer 1/P.
    - Matrices that write to the stream have a variance divided by 2L, so that the stream's variance does not grow with
      depth.
    - Norms multiply by 1. Biases and a scalar head are 0.
    """

    return _leaves(config, lambda *leaf: np.concatenate(list(_drawn(*leaf, seed))))


def placed(config: ModelConfig, seed: int, shardings: Any) -> dict:
    """Returns the params of `init` on devices. A process keeps the pieces of its own devices alone.

    `shardings`: of each leaf, a tree like params.
    """

    def draw(path, shape, about):
        home = functools.reduce(lambda tree, name: tree[name], path, shardings)
        return relayout.streamed(shape, np.float32, home, _drawn(path, shape, about, seed))

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
    noise: Float[Array, "*rows D"] | None = None,
    dtype: Any = jnp.float32,
    loop: layer_loop.LayerLoop = layer_loop.ALL_WRITTEN,
    rows: Callable | None = None,
    routing: experts.Routing = experts.ALONE,
    recur: Callable | None = None,
) -> tuple[Float[Array, "*rows D"], Any]:
    """Returns the last layer's normed output, and the cache after all calls of `attend`.

    Any leading shape works: [R], [replicas, R], [B, T].

    attend(layer, q [..., N, H], k [..., K, H], v [..., K, H], cache, *, scale, window, soft_cap) -> (out [..., N, H],
    cache). q and k are rotated by `positions`. `attend` is called once per layer, in order. K and H are the layer's own, as
    config.kept says. Where a layer reads another one's pages, k and v are those that the other layer had.
    Where the config has `sinks`, attend also gets sinks= [N]: for each query head a score that joins each softmax. It has
    no value, so it only takes weight: out = sum_j exp(s_j) v_j / (sum_j exp(s_j) + exp(sink)).
    It gives its output the name layer_loop.ATTENDED where a remat policy may keep it.

    recur(layer, inputs, g [..., H], beta [..., H], weights, cache) -> (out [..., H, V], cache) is called in the place of
    `attend` in a layer with a recurrent state. inputs, weights: gated_delta.Inputs, of the rows [..., h, K] and [..., H, V], and of
    the convolution [W, h, K] and [W, H, V]. It computes the convolution, gated_delta.keyed and the rule in float32 or wider.

    Args:
      noise: is added to the embeddings, before embed_scale. None: nothing.
      dtype: of the computation; params of another dtype are cast where they are used.
      loop: the form of the loop over layers. Scanned, `attend` gets a traced number of the layer.
      routing: how rows come to their experts (models/experts.py). Its `choose` is called once per layer with experts, behind
        `attend`, with the same cache.
      rows: (embed [V, D], tokens, dtype) -> [*rows, D], also of the embeddings of each layer. None: `embed[tokens]`, with XLA's
        own gradient.
    """
    graph, _ = _skeleton(config)
    rows = rows or (lambda embed, tokens, dtype: embed[tokens].astype(dtype))
    calls = layer_loop.Callbacks(attend, routing, recur)
    return nnx.merge(graph, params).hidden(tokens, positions, calls, cache, noise, dtype, loop, rows)


def logits(params: dict, config: ModelConfig, h: Float[Array, "*rows D"]) -> Float[Array, "*rows V"]:
    """Returns scores of every token, after the final soft cap: float32, or float64 for a float64 h.

    Sums run in the same dtype.
    """
    graph, _ = _skeleton(config)
    return nnx.merge(graph, params).logits(h)


def rewards(params: dict, h: Float[Array, "*rows D"]) -> Float[Array, "*rows"]:
    """Returns the number that the head of a reward model gives each token: float32, or float64 for a float64 h."""
    with jax.named_scope("head"):
        wide = jnp.promote_types(h.dtype, jnp.float32)
        return jnp.sum(h.astype(wide) * params["score"][:, 0].astype(wide), axis=-1)
