"""The gated delta rule: each head keeps a matrix, which every token decays and then corrects at its key (arXiv 2412.06464).

A token with decay exp(g), key k, value v, query q and rate beta turns the state S [K, V] into S', and reads o (eq. 10):

    S' = exp(g) S + k (beta (v - exp(g) S^T k))^T        o = S'^T q

Queries, keys and values are first convolved with those of a few tokens before. `steps` computes the rule token by token, as
an engine's rows do. `packed` computes whole rows by chunks of matrix products, as a learner wants it. Both are of float32 or
wider, and differ by rounding alone.

Invariant: nothing passes from one segment of a packed row to the next, neither by the state nor by the convolution.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from jaxrl_post.kernels import triangular

CHUNK = (16, 64)  # least and most tokens of one triangular system
HOW = dict(precision=jax.lax.Precision.HIGHEST)


class Tokens(NamedTuple):
    """What the rule reads of tokens. H: heads, whose keys have K numbers and whose values have V. g is at most 0."""

    q: Float[Array, "*tokens H K"]
    k: Float[Array, "*tokens H K"]
    v: Float[Array, "*tokens H V"]
    g: Float[Array, "*tokens H"]
    beta: Float[Array, "*tokens H"]


class Changes(NamedTuple):
    """What moves a state: of tokens, all but their queries. Keys may be those of the h key heads."""

    k: Float[Array, "*tokens h K"]
    v: Float[Array, "*tokens H V"]
    g: Float[Array, "*tokens H"]
    beta: Float[Array, "*tokens H"]


class Inputs(NamedTuple):
    """What the convolution reads of tokens, and how it weighs it: tokens are then its W positions. H / h value heads share a key."""

    q: Float[Array, "*tokens h K"]
    k: Float[Array, "*tokens h K"]
    v: Float[Array, "*tokens H V"]


def keyed(convolved: Inputs, g: Float[Array, "*tokens H"], beta: Float[Array, "*tokens H"]) -> Tokens:
    """Returns what the rule reads of convolved inputs, in their dtype: activated, keys and queries of length 1, queries divided by sqrt(K).

    Queries and keys are those of the key heads, [..., h, K]. The sum of squares under each length is above 0 by 1e-6, as in
    transformers."""
    q, k, v = jax.tree.map(jax.nn.silu, convolved)
    q, k = (x * jax.lax.rsqrt(jnp.sum(x * x, axis=-1, keepdims=True) + 1e-6) for x in (q, k))
    return Tokens(q * q.shape[-1] ** -0.5, k, v, g, beta)


def per_value_head(tokens: Tokens) -> Tokens:
    """Returns the tokens with the query and the key that each value head reads."""
    shared = tokens.v.shape[-2] // tokens.k.shape[-2]
    return tokens._replace(q=jnp.repeat(tokens.q, shared, axis=-2), k=jnp.repeat(tokens.k, shared, axis=-2))


def step(
    state: Float[Array, "*rows H K V"], token: Tokens
) -> tuple[Float[Array, "*rows H K V"], Float[Array, "*rows H V"]]:
    """Returns the state after one token of each row, and what the token reads."""
    state = state * jnp.exp(token.g)[..., None, None]
    seen = jnp.einsum("...hkv,...hk->...hv", state, token.k, **HOW)
    state = state + token.k[..., None] * (token.beta[..., None] * (token.v - seen))[..., None, :]
    return state, jnp.einsum("...hkv,...hk->...hv", state, token.q, **HOW)


def steps(
    state: Float[Array, "*rows H K V"], tokens: Tokens, live: Bool[Array, " T *rows"]
) -> tuple[Float[Array, "*rows H K V"], Float[Array, "T *rows H V"]]:
    """Returns the state after T tokens of each row, one after another. A token that is not live changes no state."""

    def one(state: Array, given: tuple[Tokens, Array]) -> tuple[Array, Array]:
        after, out = step(state, given[0])
        return jnp.where(given[1][..., None, None, None], after, state), out

    return jax.lax.scan(one, state, (tokens, live))


def packed(tokens: Tokens, segment_ids: Int[Array, "B T"], chunk: int | None = None) -> Float[Array, "B T H V"]:
    """Returns what every token of packed rows reads. Each segment begins with a state of zeros.

    A chunk has `chunk` tokens, a power of two. If not given, it has about K: the products of a chunk's tokens with each other then
    cost what those with the state do. Within it, the corrections d of all tokens solve one unit lower triangular system
    (section 3.3). The state S before the chunk is on its right side: (1 + A) d = beta (v - exp(G) S^T k). G: the sum of g from
    the chunk's first token. A[i, j] = beta_i exp(G_i - G_j) k_i k_j for an earlier token j of the same segment, and else 0. So d
    is linear in S.
    """
    B, T = segment_ids.shape
    chunk = chunk or min(max(CHUNK[0], 1 << (tokens.k.shape[-1] - 1).bit_length()), CHUNK[1])
    count = -(-T // chunk)

    def cut(x: Array) -> Array:
        """Returns x[B, T, ...] as [chunks, B, chunk, ...], with zeros behind the last token."""
        x = jnp.pad(x, [(0, 0), (0, count * chunk - T), *[(0, 0)] * (x.ndim - 2)])
        return jnp.moveaxis(x.reshape(B, count, chunk, *x.shape[2:]), 1, 0)

    parts, ids = Tokens(*map(cut, tokens)), cut(segment_ids)
    last = ids[:, :, -1]
    before = jnp.concatenate([jnp.full_like(last[:1], -1), last[:-1]])  # the segment that reaches into the chunk
    start = jnp.zeros((B, *tokens.k.shape[2:], tokens.v.shape[-1]), tokens.v.dtype)
    solved = jax.vmap(_solved)(parts, ids, before)  # of all chunks at once: none of it needs the state
    _, out = jax.lax.scan(jax.checkpoint(_advance), start, (parts.q, parts.k, solved))
    return jnp.moveaxis(out, 0, 1).reshape(B, count * chunk, *out.shape[3:])[:, :T]


class _Solved(NamedTuple):
    """A chunk's system, solved. `kept`: what is left of the state at each token. d = `alone` - `by_state` S."""

    kept: Float[Array, "B C H"]
    decay: Float[Array, "B H C C"]  # from token j to token i
    alone: Float[Array, "B H C V"]
    by_state: Float[Array, "B H C K"]


def _solved(tokens: Tokens, ids: Array, before: Array) -> _Solved:
    g, upto = jnp.moveaxis(tokens.g, 1, -1), jnp.tri(ids.shape[1], dtype=tokens.g.dtype)
    # Summed from token j to token i alone: the difference of two sums from the chunk's first token loses digits.
    gaps = jnp.matmul(upto * g[:, :, None], 1 - upto.T, **HOW)
    same = (ids[:, :, None] == ids[:, None, :]) & (upto > 0)
    decay = jnp.exp(jnp.where(same[:, None], gaps, -jnp.inf))
    kept = jnp.where((ids == before[:, None])[..., None], jnp.exp(jnp.cumsum(tokens.g, axis=1)), 0)

    met = jnp.einsum("bihk,bjhk->bhij", tokens.k, tokens.k, **HOW) * jnp.moveaxis(tokens.beta, 1, -1)[..., None]
    right = tokens.beta[..., None] * jnp.concatenate([tokens.v, kept[..., None] * tokens.k], axis=-1)
    moved = jnp.einsum("bhij,bjhr->bhir", triangular.inverse(jnp.tril(met * decay, -1)), right, **HOW)
    return _Solved(kept, decay, *jnp.split(moved, [tokens.v.shape[-1]], axis=-1))


def _advance(state: Array, given: tuple[Array, Array, _Solved]) -> tuple[Array, Array]:
    """Returns the state after a chunk of each row, and what the chunk's tokens read."""
    q, k, (kept, decay, alone, by_state) = given
    moved = alone - jnp.einsum("bhik,bhkv->bhiv", by_state, state, **HOW)
    reads = jnp.einsum("bihk,bjhk->bhij", q, k, **HOW) * decay
    out = jnp.einsum("bhij,bhjv->bihv", reads, moved, **HOW)
    out = out + kept[..., None] * jnp.einsum("bhkv,bihk->bihv", state, q, **HOW)
    state = kept[:, -1, :, None, None] * state + jnp.einsum("bhj,bjhk,bhjv->bhkv", decay[:, :, -1], k, moved, **HOW)
    return state, out


def convolved(
    x: Float[Array, "B T *D"], weights: Float[Array, " W *D"], segment_ids: Int[Array, " B T"]
) -> Float[Array, "B T *D"]:
    """Returns the sum over the last W tokens of a segment, each times its weights; the last weights are those of the token itself."""
    out, axes = x * weights[-1], (1,) * (x.ndim - 2)
    for back in range(1, len(weights)):
        earlier, theirs = (
            jnp.pad(a[:, :-back], [(0, 0), (back, 0), *[(0, 0)] * (a.ndim - 2)]) for a in (x, segment_ids + 1)
        )
        same = (theirs == segment_ids + 1).reshape(*segment_ids.shape, *axes)
        out = out + jnp.where(same, earlier, 0) * weights[-1 - back]
    return out
