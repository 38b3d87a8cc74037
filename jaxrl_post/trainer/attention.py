"""The trainer's `attend`: causal attention inside the segments of packed rows, or along branches of them.

Invariant: a token sees itself and the earlier tokens of its own text only. Its text is its segment, or, where texts
share their beginnings (kernels/branches.py), its segment and the beginnings before it. Masked pairs have weight exactly
zero. Padding sees itself, so no softmax is empty.

A form computes it: a kernel of the device (kernels/choice.py), run on each device's own rows and heads, or `blocks` here.
Each names its output, by which a remat policy keeps it. `blocks` processes queries in blocks, each recomputed in the
backward pass, so the scores of only one block exist at a time. In rows of up to WRITTEN_OUT tokens, blocks are written
out and each sees the keys up to its own end. On CPU this takes about half the time of computing all pairs at once.
Source: scripts/results/choices.json, by scripts/bench.py choices. In longer rows a loop over blocks is compiled once, and
each block sees all keys.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jaxrl_post.kernels.branches import Branches, Standing, sees
from jaxrl_post.models.layer_loop import ATTENDED, named
from jaxrl_post.parallel import mesh as meshes
from jaxrl_post.parallel import row_pieces

BLOCK = 64  # smallest block of queries
BLOCKS = 8  # most blocks of a row that are written out, as each of them is compiled
WRITTEN_OUT = 1024
LOOPED = 512  # queries of a block in the loop

Texts = Int[Array, "B T"] | Branches  # segment ids, or branches


def packed(
    texts: Texts, sharding: jax.sharding.NamedSharding | None = None, form: Callable | None = None, context: int = 1
) -> Callable:
    """Returns `attend` for hidden states whose tokens are flattened to [B*T], as the decoder wants them.

    Queries q are [B*T, N, H].

    Args:
      texts: segment ids of packed rows, or how their texts branch.
      sharding: of q, k and v as [B, T, N, H] (mesh.heads_sharding), or None on one device.
      form: a kernel with the arguments of `blocks`, or None for `blocks`.
      context: the pieces of a row, of which each is a row here (row_pieces.RowPieces). Then texts branch. A device has the queries of
        its own pieces, and gathers keys and values of whole rows.
    """
    B, T = jax.tree.leaves(texts)[0].shape
    # What texts say is gathered here, once for all layers; keys and values in each of them.
    gathered = row_pieces.RowPieces(sharding.mesh, context).of_neighbours if context > 1 else lambda x: x
    if context > 1:
        texts = jax.tree.map(gathered, texts)._replace(own=texts.keys)

    def attend(
        layer: int | Int[Array, ""],
        q: Float[Array, "BT N H"],
        k: Float[Array, "BT K H"],
        v: Float[Array, "BT K H"],
        cache: Any,
        *,
        scale: float,
        window: int | None,
        soft_cap: float | None,
        sinks: Float[Array, " N"] | None = None,
    ) -> tuple[Float[Array, "BT N H"], Any]:
        def rows(x):
            x = x.reshape(B, T, *x.shape[1:])
            return x if sharding is None else jax.lax.with_sharding_constraint(x, sharding)

        how = dict(scale=scale, window=window, soft_cap=soft_cap)
        given = (rows(q), gathered(rows(k)), gathered(rows(v)), texts, *(() if sinks is None else (sinks,)))
        if form is None and context == 1:
            out = named(blocks(*given, **how), ATTENDED)
        else:
            out = meshes.by_rows_and_heads(sharding, functools.partial(form or blocks, **how))(*given)
            out = out if form else named(out, ATTENDED)
        return out.reshape(B * T, *out.shape[2:]), cache

    return attend


def blocks(
    q: Float[Array, "B T N H"],
    k: Float[Array, "B S K H"],
    v: Float[Array, "B S K H"],
    texts: Texts,
    sinks: Float[Array, " N"] | None = None,
    *,
    scale: float,
    window: int | None,
    soft_cap: float | None,
) -> Float[Array, "B T N H"]:
    """Returns attention in jnp. `window`: a query sees its own position and the window - 1 before it.

    `sinks`: for each query head a score without a value, which joins each softmax (arXiv 2508.10925).
    """
    T, branches = q.shape[1], isinstance(texts, Branches)
    block = jax.checkpoint(lambda q, k, v, mask: _block(q, k, v, mask, sinks, scale, soft_cap))
    if T > WRITTEN_OUT:
        return _looped(block, q, k, v, texts, window)
    size, outs = max(BLOCK, -(-T // BLOCKS)), []
    for start in range(0, T, size):
        end = min(start + size, T)
        first = 0 if window is None or branches else max(0, start - window + 1)
        keys = slice(first, k.shape[1] if branches and texts.own else end)
        mask = _mask(texts, slice(start, end), keys, window)
        outs.append(block(q[:, start:end], k[:, keys], v[:, keys], mask))
    return jnp.concatenate(outs, axis=1)


def _looped(block: Callable, q: Array, k: Array, v: Array, texts: Texts, window: int | None) -> Array:
    """Returns the same by one loop over blocks of queries. A last block that lacks queries is filled up."""
    B, T = q.shape[:2]
    missing = -T % LOOPED
    given = q, texts.queries if isinstance(texts, Branches) else texts
    queries, own = (
        jax.tree.map(lambda x: jnp.moveaxis(_padded(x, missing).reshape(B, -1, LOOPED, *x.shape[2:]), 1, 0), one)
        for one in given
    )
    starts = jnp.arange(len(queries)) * LOOPED

    def one(given):
        start, queries, own = given
        if isinstance(texts, Branches):
            return block(queries, k, v, _along(own, texts, window))
        behind = start + jnp.arange(LOOPED)[:, None] - jnp.arange(T)[None, :]
        return block(queries, k, v, (own[:, :, None] == texts[:, None, :]) & _near(behind, window))

    out = jnp.moveaxis(jax.lax.map(one, (starts, queries, own)), 0, 1)
    return out.reshape(B, T + missing, *out.shape[3:])[:, :T]


def _padded(x: Array, missing: int) -> Array:
    return jnp.pad(x, ((0, 0), (0, missing), *((0, 0),) * (x.ndim - 2)))


def _near(behind: jax.Array, window: int | None) -> jax.Array:
    return behind >= 0 if window is None else (behind >= 0) & (behind < window)


def _mask(texts: Texts, queries: slice, keys: slice, window: int | None) -> jax.Array:
    """Returns bool[B, queries, keys]: True where the query sees the key.

    Positions rise by one inside a segment, so distances in the row are distances in the segment. Across branches they are not.
    """
    if isinstance(texts, Branches):
        own = jax.tree.map(lambda x: x[:, queries], texts.queries)
        return _along(own, jax.tree.map(lambda x: x[:, keys], texts._replace(own=None)), window)
    behind = jnp.arange(queries.start, queries.stop)[:, None] - jnp.arange(keys.start, keys.stop)[None, :]
    return (texts[:, queries, None] == texts[:, None, keys]) & _near(behind, window)


def _along(own: Standing, texts: Branches, window: int | None) -> jax.Array:
    """Returns bool[B, queries, keys]: which queries see which keys of `texts`."""
    places, positions = (x[:, :, None] for x in own)
    behind = positions - texts.keys.positions[:, None, :]
    upto = texts.keys.places[:, None, :] <= places
    return upto & sees(places, texts.until[:, None, :], behind, window)


def _block(
    q: Float[Array, "B T N H"],
    k: Float[Array, "B S K H"],
    v: Float[Array, "B S K H"],
    mask,
    sinks: Float[Array, " N"] | None,
    scale: float,
    soft_cap: float | None,
) -> Float[Array, "B T N H"]:
    """Returns softmax attention of one block of queries.

    Scores are float32 or wider. The output is divided by the sum of the softmax weights at the end.
    """
    B, T, N, H = q.shape
    K = k.shape[2]
    wide = jnp.promote_types(q.dtype, jnp.float32)
    scores = scale * jnp.einsum("btkgh,bskh->bkgts", q.reshape(B, T, K, N // K, H), k, preferred_element_type=wide)
    if soft_cap is not None:
        scores = soft_cap * jnp.tanh(scores / soft_cap)
    scores = jnp.where(mask[:, None, None], scores, jnp.finfo(wide).min / 2)
    high, own = jnp.max(scores, axis=-1, keepdims=True), None
    if sinks is not None:
        own = sinks.astype(wide).reshape(K, N // K, 1, 1)
        high = jnp.maximum(high, own)
    high = jax.lax.stop_gradient(high)
    weights = jnp.exp(scores - high)
    total = jnp.sum(weights, axis=-1)
    total = jnp.moveaxis(total if own is None else total + jnp.exp(own - high)[..., 0], 3, 1)
    out = jnp.einsum("bkgts,bskh->btkgh", weights.astype(v.dtype), v, preferred_element_type=wide)
    return (out / total[..., None]).astype(q.dtype).reshape(B, T, N, H)
