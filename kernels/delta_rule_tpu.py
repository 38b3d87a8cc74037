"""The gated delta rule of packed rows on TPU, in Pallas: forward and backward, chunk by chunk (arXiv 2412.06464, section 3.3).

A visit takes one row, a block of value heads and one chunk of tokens. Their states stay in the chip from the first chunk of a
row to the last. The backward pass walks from the last chunk to the first. It begins each with the state that the forward
pass met there, and computes the chunk again.

`chunk` is the same rule as models/gated_delta.packed, of one head. Both kernels trace it, the second one its derivative.

Invariant: nothing passes from one segment of a row to the next.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from jaxrl_post.kernels import triangular
from jaxrl_post.kernels.pallas_tpu import pl, pltpu

LANES, CHUNK = 128, 64
BLOCK = 4  # value heads of a visit: their products wait for none of each other's
MEMORY = 56 << 20  # of the chip, that a kernel may use
NEEDS = f"float32 states whose sides are {LANES}, and rows of a multiple of {CHUNK} tokens"


class Walked(NamedTuple):
    """Of packed rows, by head. A key head has H / h value heads. Rates lie by chunks."""

    q: Float[Array, "B h T K"]
    k: Float[Array, "B h T K"]
    v: Float[Array, "B H T V"]
    g: Float[Array, "B H chunks C"]
    beta: Float[Array, "B H chunks C"]


def serves(dtype: Any, key_heads: int, value_heads: int, key_dim: int, value_dim: int, tokens: int) -> bool:
    sides = key_dim == value_dim == LANES and tokens % CHUNK == 0
    return dtype == jnp.float32 and sides and value_heads % key_heads == 0


class How(NamedTuple):
    """Tokens of a chunk, value heads of a visit at most, and whether the kernels run without a device, in any size."""

    chunk: int = CHUNK
    block: int = BLOCK
    interpret: bool = False


USUAL = How()


def packed(tokens: Any, segment_ids: Int[Array, "B T"], how: How = USUAL) -> Float[Array, "B T H V"]:
    """Returns what every token of packed rows reads. Each segment begins with a state of zeros.

    tokens: (q and k [B, T, h, K], v [B, T, H, V], g and beta [B, T, H]), float32.
    """

    def by_chunk(x: Array) -> Array:
        return x.reshape(*x.shape[:-1], -1, how.chunk)

    by_head = [jnp.swapaxes(x, 1, 2) for x in tokens]
    given = Walked(*by_head[:3], *map(by_chunk, by_head[3:]))
    ids = by_chunk(segment_ids.astype(jnp.float32))  # whole numbers, which float32 compares as well
    return jnp.swapaxes(_walked(how, given, ids), 1, 2)


# ---- one chunk of one head


def _product(x: Array, y: Array, over: tuple[int, int] = (1, 0)) -> Array:
    """Returns the product of two matrices over one axis of each."""
    axes = (over[:1], over[1:]), ((), ())
    return lax.dot_general(x, y, axes, precision=lax.Precision.HIGHEST, preferred_element_type=x.dtype)


def chunk(
    state: Float[Array, "K V"],
    q: Float[Array, "C K"],
    k: Float[Array, "C K"],
    v: Float[Array, "C V"],
    g: Float[Array, "1 C"],
    beta: Float[Array, "1 C"],
    ids: Float[Array, "1 C"],
    before: Float[Array, "1 1"],
) -> tuple[Float[Array, "K V"], Float[Array, "C V"]]:
    """Returns the state behind a chunk, and what its tokens read. before: the segment to which the state belongs."""
    size = len(k)
    row, column = (lax.broadcasted_iota(jnp.int32, (size, size), axis) for axis in (0, 1))
    upto, earlier, end = row >= column, row > column, row == size - 1

    def upright(x: Array) -> Array:
        """Returns a row [1, C] as a column [C, 1]."""
        return jnp.sum(jnp.where(row == column, x, 0.0), axis=1, keepdims=True)

    steps = jnp.where(upto, g, 0.0)
    decay = jnp.exp(_product(steps, jnp.where(earlier, 1.0, 0.0)))  # summed from token to token alone
    decay = jnp.where((upright(ids) == ids) & upto, decay, 0.0)
    kept = jnp.where(upright(ids) == before, jnp.exp(jnp.sum(steps, axis=1, keepdims=True)), 0.0)
    rate = upright(beta)
    solved = triangular.inverse(jnp.where(earlier, _product(k, k, (1, 1)) * rate * decay, 0.0))
    moved = _product(solved, rate * (v - kept * _product(k, state)))
    out = _product(_product(q, k, (1, 1)) * decay, moved) + kept * _product(q, state)
    left = upright(jnp.sum(jnp.where(end, decay, 0.0), axis=0, keepdims=True))
    whole = jnp.sum(jnp.where(end[:, :1], kept, 0.0), axis=0, keepdims=True)
    return whole * state + _product(left * k, moved, (0, 0)), out


# ---- the walk


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _walked(how: How, given: Walked, ids: Float[Array, "B chunks C"]) -> Float[Array, "B H T V"]:
    return _forward(how, given, ids, keeps=False)[0]


def _with_states(how: How, given: Walked, ids: Array) -> tuple[Array, tuple]:
    out, states = _forward(how, given, ids, keeps=True)
    return out, (given, ids, states)


def _slopes(how: How, met: tuple, slope: Array) -> tuple[Walked, None]:
    given, ids, states = met
    found = _backward(how, given, ids, states, slope)
    shared = given.v.shape[1] // given.k.shape[1]

    def of_keys(x: Array) -> Array:
        return jnp.sum(x.reshape(len(x), -1, shared, *x.shape[2:]), axis=2)

    return found._replace(q=of_keys(found.q), k=of_keys(found.k)), None


_walked.defvjp(_with_states, _slopes)


class _Blocks(NamedTuple):
    """How arrays are divided over visits. at: the number of a visit's chunk by that of the visit."""

    sizes: dict[str, int]
    at: Any

    def rows(self, heads: str, side: int) -> Any:
        return pl.BlockSpec(
            (None, self.sizes[heads], self.sizes["chunk"], side), lambda b, head, n: (b, head, self.at(n), 0)
        )

    def rates(self) -> Any:
        """All chunks of a row at once: a chunk's alone are less than a tile."""
        return pl.BlockSpec(
            (None, self.sizes["value"], self.sizes["chunks"], self.sizes["chunk"]), lambda b, head, n: (b, head, 0, 0)
        )

    def ids(self) -> Any:
        return pl.BlockSpec((None, self.sizes["chunks"], self.sizes["chunk"]), lambda b, head, n: (b, 0, 0))

    def states(self, K: int, V: int) -> Any:
        block = (None, self.sizes["value"], None, K, V)
        return pl.BlockSpec(block, lambda b, head, n: (b, head, self.at(n), 0, 0))


def _sizes(how: How, given: Walked) -> dict[str, int]:
    h, H = given.k.shape[1], given.v.shape[1]
    keys = max(1, how.block * h // H)
    keys = keys if h % keys == 0 else 1
    return {"key": keys, "value": keys * H // h, "chunks": given.g.shape[2], "chunk": how.chunk}


def _call(kernel: Any, given: Walked, in_specs: list, out_specs: list, made: list, how: How, name: str) -> Any:
    sizes, (B, H, _, V), K = _sizes(how, given), given.v.shape, given.k.shape[-1]
    return pl.pallas_call(
        functools.partial(kernel, sizes["value"] // sizes["key"]),
        out_shape=made,
        grid=(B, H // sizes["value"], sizes["chunks"]),
        in_specs=in_specs,
        out_specs=out_specs,
        scratch_shapes=[pltpu.VMEM((sizes["value"], K, V), given.v.dtype)],
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel", "parallel", "arbitrary"),
            vmem_limit_bytes=None if how.interpret else MEMORY,
        ),
        interpret=how.interpret,
        name=name,
    )


def _inputs(blocks: _Blocks, given: Walked) -> list:
    K, V = given.k.shape[-1], given.v.shape[-1]
    return [
        blocks.rows("key", K),
        blocks.rows("key", K),
        blocks.rows("value", V),
        blocks.rates(),
        blocks.rates(),
        blocks.ids(),
    ]


def _forward(how: How, given: Walked, ids: Array, keeps: bool) -> tuple:
    """Returns what tokens read and, if `keeps`, the state before each chunk [B, H, chunks, K, V]."""
    blocks, (B, H, _, V), K = _Blocks(_sizes(how, given), lambda n: n), given.v.shape, given.k.shape[-1]
    made = [jax.ShapeDtypeStruct(given.v.shape, given.v.dtype)]
    specs = [blocks.rows("value", V)]
    if keeps:
        made.append(jax.ShapeDtypeStruct((B, H, blocks.sizes["chunks"], K, V), given.v.dtype))
        specs.append(blocks.states(K, V))
    run = _call(_forward_kernel, given, _inputs(blocks, given), specs, made, how, "delta_rule")
    return tuple(run(*given, ids))


def _backward(how: How, given: Walked, ids: Array, states: Array, slope: Array) -> Walked:
    """Returns the gradients, of queries and keys for each value head."""
    sizes = _sizes(how, given)
    blocks, (_, H, T, V), K = _Blocks(sizes, lambda n: sizes["chunks"] - 1 - n), given.v.shape, given.k.shape[-1]
    specs = Walked(*[blocks.rows("value", K)] * 2, blocks.rows("value", V), *[blocks.rates()] * 2)
    made = Walked(*[jax.ShapeDtypeStruct((len(ids), H, T, K), given.k.dtype)] * 2, *given[2:])
    made = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in made]
    inputs = [*_inputs(blocks, given), blocks.states(K, V), blocks.rows("value", V)]
    run = _call(_backward_kernel, given, inputs, list(specs), made, how, "delta_rule_backward")
    return Walked(*run(*given, ids, states, slope))


def _head(refs: tuple, head: int, shared: int, at: Any) -> tuple:
    """Returns q, k, v, g and beta of a chunk of a head."""
    q, k, v, g, beta = refs
    return q[head // shared], k[head // shared], v[head], g[head, pl.ds(at, 1)], beta[head, pl.ds(at, 1)]


def _segments(ids: Any, at: Any) -> tuple[Array, Array]:
    """Returns the segments of a chunk's tokens [1, C], and that of the last token before them [1, 1]; before a row's first, -1."""
    last = lax.broadcasted_iota(jnp.int32, (1, ids.shape[1]), 1) == ids.shape[1] - 1
    earlier = jnp.sum(jnp.where(last, ids[pl.ds(jnp.maximum(at - 1, 0), 1)], 0.0), axis=1, keepdims=True)
    return ids[pl.ds(at, 1)], jnp.where(at == 0, -1.0, earlier)


def _forward_kernel(shared: int, q: Any, k: Any, v: Any, g: Any, beta: Any, ids: Any, out: Any, *rest: Any) -> None:
    (*kept, state), at = rest, pl.program_id(2)

    @pl.when(at == 0)
    def begin() -> None:
        state[...] = jnp.zeros(state.shape, state.dtype)

    segments = _segments(ids, at)
    for head in range(len(state)):
        for ref in kept:
            ref[head] = state[head]
        state[head], out[head] = chunk(state[head], *_head((q, k, v, g, beta), head, shared, at), *segments)


def _backward_kernel(shared: int, *refs: Any) -> None:
    given, ids, states, slope, outs, behind = refs[:5], refs[5], refs[6], refs[7], Walked(*refs[8:13]), refs[13]
    turn, chunks = pl.program_id(2), pl.num_programs(2)
    at = chunks - 1 - turn

    @pl.when(turn == 0)
    def begin() -> None:
        behind[...] = jnp.zeros(behind.shape, behind.dtype)

    segments = _segments(ids, at)
    for head in range(len(behind)):
        own = states[head], *_head(given, head, shared, at)
        _, pull = jax.vjp(lambda *own: chunk(*own, *segments), *own)
        behind[head], outs.q[head], outs.k[head], outs.v[head], g, beta = pull((behind[head], slope[head]))
        outs.g[head, pl.ds(at, 1)], outs.beta[head, pl.ds(at, 1)] = g, beta
