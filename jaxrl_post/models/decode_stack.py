"""The layers of a decoder for the few rows of a decode step: products, and what one kernel does between two of them.

XLA makes three to four kernels between two products of a layer. On a GPU each of them takes longer to start than to run, where
rows are few. The numbers are those of models/layer.py, which has no form for one device alone, and none for rows that are trained.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jaxrl_post.models import decoder
from jaxrl_post.models.cache_kinds import Pages
from jaxrl_post.models.model_config import ACTIVATIONS, ModelConfig

SIDES = ("q", "k", "v")
NEEDS = "layers of attention with keys and values of their own and one dense feed-forward, without low-rank additions or further norms"


class Between(NamedTuple):
    """What the stack calls (kernels/rows_gpu.py). A product is float32 [P, R, outputs], in parts that are still to be added.

    - product: (x [R, inputs], matrix [inputs, outputs]) -> product
    - normed: (h [R, D], product or None, weight [D]) -> (h with the product added, its norm)
    - attend: (layer, product of queries, keys and values beside one another, biases, norms, turn, cache, sinks or None) ->
      (out [R, N, H], cache). biases, norms: of queries, keys and values as the model has them, or none.
    """

    product: Callable
    normed: Callable
    attend: Callable


def serves(config: ModelConfig) -> bool:
    """Returns whether the stack has what these layers have: attention with pages of its own, and a dense feed-forward."""
    pages = all(isinstance(kept, Pages) and config.sides(layer) == SIDES for layer, kept in enumerate(config.kept))
    more = (
        *(config.experts, config.lora, config.eight_bits, config.rotary_dim, config.linear),
        *(config.post_norms, config.attn_gate, config.v_norm, config.layer_scalars, config.layer_embeds),
        *(config.o_bias, config.scalar, config.shared_layers),
    )
    return pages and not any(more)


def hidden(
    params: dict,
    config: ModelConfig,
    tokens: Int[Array, " R"],
    positions: Int[Array, " R"],
    between: Between,
    cache: Any,
    dtype: Any,
) -> tuple[Float[Array, "R D"], Any]:
    """Returns what decoder.hidden does, for layers that `serves` accepts."""
    with jax.named_scope("embed"):
        h = params["embed"][tokens].astype(dtype)
        h = h if config.embed_scale == 1.0 else h * jnp.asarray(config.embed_scale, dtype)
    with jax.named_scope("rope"):
        turns = decoder.rotations(config, positions, jnp.float32)
    layers = [params["layers"][str(index)] for index in range(config.layers)]
    following = [*(layer["attn_norm"] for layer in layers[1:]), params["final_norm"]]
    h, x = between.normed(h, None, layers[0]["attn_norm"])
    for index, (layer, last) in enumerate(zip(layers, following, strict=True)):
        with jax.named_scope(f"layer_{index}"):
            out, cache = _attended(config, index, layer, x, turns[index], between, cache)
            h, x = between.normed(h, out, layer["ffw_norm"])
            with jax.named_scope("ffw"):
                gate, up = (jnp.einsum("rd,df->rf", x, layer[side].astype(dtype)) for side in ("gate", "up"))
                out = between.product(ACTIVATIONS[config.activation](gate) * up, layer["down"].astype(dtype))
            h, x = between.normed(h, out, last)
    return x, cache


def _attended(
    config: ModelConfig, index: int, layer: dict, x: Array, turn: tuple[Array, Array], between: Between, cache: Any
) -> tuple[Array, Any]:
    """Returns the product of a layer's attention, and the cache."""
    with jax.named_scope("qkv"):
        joined = jnp.concatenate([layer[side].reshape(x.shape[-1], -1) for side in SIDES], axis=1)
        made = between.product(x, joined.astype(x.dtype))
    with jax.named_scope("attend"):
        biases = tuple(layer[f"{side}_bias"] for side in SIDES) if config.qkv_bias else ()
        norms = (layer["q_norm"], layer["k_norm"]) if config.qk_norm else ()
        out, cache = between.attend(index, made, biases, norms, turn, cache, layer["sinks"] if config.sinks else None)
        return between.product(out.reshape(len(x), -1), layer["o"].reshape(-1, x.shape[-1]).astype(x.dtype)), cache
