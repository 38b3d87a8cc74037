"""The trainer's `recur`: a gated delta rule inside the segments of packed rows (models/gated_delta.py).

Invariant: state and convolution begin with zeros in every segment. A token depends on the earlier tokens of its own segment only.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jaxrl_post.models import gated_delta
from jaxrl_post.models.gated_delta import Inputs
from jaxrl_post.parallel import mesh as meshes
from jaxrl_post.parallel import row_pieces


def packed(
    segment_ids: Int[Array, "B T"],
    sharding: jax.sharding.NamedSharding | None = None,
    kernel: Any = None,
    context: int = 1,
) -> Callable:
    """Returns `recur` for hidden states whose tokens are flattened to [B*T], as the decoder wants them.

    Args:
      sharding: of inputs as [B, T, heads, size] (mesh.heads_sharding), or None on one device.
      kernel: the module whose kernel computes the shapes that it serves (kernels/choice.of_delta_rule), or None.
      context: the pieces of a row, of which each is a row here (row_pieces.RowPieces). Devices that share rows exchange parts of rows
        for heads: each walks whole rows with its own heads.
    """
    B, T = segment_ids.shape
    read = functools.partial(_read, kernel)
    if context > 1:
        read = _by_heads(read, row_pieces.RowPieces(sharding.mesh, context))
    run = meshes.by_rows_and_state_heads(sharding, read)

    def recur(
        layer: int | Int[Array, ""],
        inputs: Inputs,
        g: Float[Array, "BT H"],
        beta: Float[Array, "BT H"],
        weights: Inputs,
        cache: Any,
    ) -> tuple[Float[Array, "BT H V"], Any]:
        rows = jax.tree.map(lambda x: x.reshape(B, T, *x.shape[1:]), (inputs, g, beta))
        return run(*rows, weights, segment_ids).reshape(B * T, *inputs.v.shape[1:]), cache

    return recur


def _by_heads(read: Callable, pieces: row_pieces.RowPieces) -> Callable:
    def run(inputs: Inputs, g: Array, beta: Array, weights: Inputs, segment_ids: Array) -> Array:
        rows = jax.tree.map(pieces.heads_of_rows, (inputs, g, beta))
        own = jax.tree.map(pieces.own_heads, weights)
        return pieces.rows_of_heads(read(*rows, own, pieces.whole(segment_ids)))

    return run


def by_text(positions: Int[Array, " R"], owners: Int[Array, " R"], starts: Int[Array, " S"], tokens: int) -> Callable:
    """Returns `recur` by which a row reads the state behind the earlier rows of its own text.

    Args:
      positions, owners: of each row, its place in its text and the number of the text.
      starts: the first row of each text. A window of `tokens` rows begins there. Rows of later texts in it change nothing before them.
    """
    whole = packed(jnp.ones((1, tokens), jnp.int32))

    def recur(layer, inputs, g, beta, weights, cache):
        rows = jax.tree.map(lambda x: jnp.pad(x, [(0, tokens), *[(0, 0)] * (x.ndim - 1)]), (inputs, g, beta))

        def text(start: Array) -> Array:
            mine = jax.tree.map(lambda x: jax.lax.dynamic_slice_in_dim(x, start, tokens), rows)
            return whole(layer, *mine, weights, None)[0]

        return jax.lax.map(text, starts)[owners, positions], cache

    return recur


def _read(
    kernel: Any, inputs: Inputs, g: Array, beta: Array, weights: Inputs, segment_ids: Array
) -> Float[Array, "B T H V"]:
    """Returns what every token reads, in float32 or wider. inputs [B, T, heads, size], g and beta [B, T, H]."""
    wide = jnp.promote_types(inputs.v.dtype, jnp.float32)
    made = jax.tree.map(lambda x, w: gated_delta.convolved(x.astype(wide), w, segment_ids), inputs, weights)
    tokens = gated_delta.keyed(made, g, beta)
    (_, T, h, K), (H, V) = tokens.k.shape, tokens.v.shape[2:]
    if kernel is not None and kernel.serves(wide, h, H, K, V, T):
        return kernel.packed(tokens, segment_ids)
    return gated_delta.packed(gated_delta.per_value_head(tokens), segment_ids)
