"""Thresholds of top-k and top-p on GPUs, in few passes over the logits.

- Ids lie in groups of GROUP. The k highest ids lie in the k groups with the highest peaks, so one pass and a small sort find the
  MOST highest ids. They answer every row whose k is below MOST.
- For other rows, each pass finds DIGIT more of a threshold's 32 bits. It counts, or weighs, the ids above each of 2 ** DIGIT keys at
  once. Five passes find a threshold, in place of 32. They run only where a row needs them. They are a kernel of Pallas-Triton,
  because XLA would store the weights and read them beside the logits.

What a row gets follows from its own numbers alone. The law, ties and the order of floats are those of kernels/thresholds.py.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int, UInt32

from jaxrl_post.kernels import thresholds
from jaxrl_post.kernels.pallas_triton import pl, triton

MOST = 520  # a top-k below it needs no further pass; 512 is a usual one
DIGIT = 7
PARTS = 8  # of a row, each weighed by a program of its own
BLOCK = 64  # ids of one turn: four threads keep the sums of one of them for 128 ends in registers
ALIKE = 1e30  # the temperature at which all ids weigh 1
NEEDS = f"more than {2 * thresholds.GROUP * MOST} ids, on one device"


def serves(rows: int, vocab: int) -> bool:
    return vocab > 2 * thresholds.GROUP * MOST


def keys(
    logits: Float[Array, "R V"],
    temperatures: Float[Array, " R"],
    top_k: Int[Array, " R"],
    top_p: Float[Array, " R"],
    *,
    interpret: bool = False,
) -> UInt32[Array, " R"]:
    """Returns thresholds.keys_of the lowest allowed logit: that of top-k where top_p >= 1, and 0 where neither cuts."""
    vocab = logits.shape[-1]
    heat, fewest = jnp.where(temperatures == 0, 1.0, temperatures), jnp.minimum(top_k, vocab)
    with jax.named_scope("highest"):
        high = thresholds.highest(logits, MOST)[0]
    few = thresholds.keys_of(high)
    of_few = jnp.take_along_axis(few, jnp.clip(fewest - 1, 0, MOST - 1)[:, None], axis=1)[:, 0]
    # More ids may tie with the last of those that were found.
    many = (temperatures > 0) & ((top_k >= MOST) | ((top_k > 0) & (of_few == few[:, -1])))

    def counted(logits: Array) -> UInt32[Array, " R"]:
        numbers = jnp.broadcast_to(jnp.asarray([-jnp.inf, ALIKE, 0.0], jnp.float32), (len(logits), 3))
        found = largest(len(logits), lambda ends: masses(logits, ends, numbers, interpret), lambda ids: fewest)
        return jnp.maximum(found, thresholds.keys_of(jnp.float32(-jnp.inf)))  # ids that are not allowed weigh nothing

    with jax.named_scope("top_k"):
        of_k = jnp.where(many, _where_needed(many, counted, logits), of_few)
        of_k = jnp.where(top_k > 0, of_k, jnp.uint32(0))

    def weighed(logits: Array) -> UInt32[Array, " R"]:
        numbers = jnp.stack([_values(of_k), heat, high[:, 0] / heat], axis=1)
        return largest(len(logits), lambda ends: masses(logits, ends, numbers, interpret), lambda mass: top_p * mass)

    with jax.named_scope("few"):  # in falling order: the mass of an id and of those before it
        weight = jnp.where(few >= of_k[:, None], jnp.exp(high / heat[:, None] - (high[:, 0] / heat)[:, None]), 0.0)
        mass = jnp.cumsum(weight, axis=1)
        last = jnp.argmax(mass >= (top_p * mass[:, -1])[:, None], axis=1)
        of_p = jnp.take_along_axis(few, last[:, None], axis=1)[:, 0]
    some = (temperatures > 0) & (top_p < 1) & (many | (top_k == 0))
    with jax.named_scope("top_p"):
        of_p = jnp.minimum(jnp.where(some, _where_needed(some, weighed, logits), of_p), few[:, 0])
    return jnp.where(top_p < 1, jnp.maximum(of_k, of_p), of_k)


def _where_needed(rows: Bool[Array, " R"], run: Callable, logits: Array) -> UInt32[Array, " R"]:
    """Returns what `run` finds for all rows, or zeros where no row needs it."""
    return lax.cond(jnp.any(rows), run, lambda logits: jnp.zeros(logits.shape[0], jnp.uint32), logits)


def largest(
    rows: int, sums: Callable[[Float[Array, "R E"]], Array], least: Callable[[Array], Array]
) -> UInt32[Array, " R"]:
    """Returns the largest key of each row at or above which the ids have the least sum that is asked for.

    Args:
      sums: of each end, [R, E], over the ids at or above it. Of a smaller one it is not less.
      least: what is asked for, [R], from the sum over all ids.
    """
    found, wanted, left = jnp.zeros((rows, 1), jnp.uint32), None, 32
    while left:
        bits = min(DIGIT, left)
        left -= bits
        # Every pass has as many ends, so that a kernel adds in one order. The last one has some more than once.
        digits = jnp.arange(1 << DIGIT, dtype=jnp.uint32) & jnp.uint32((1 << bits) - 1)
        made = sums(_values(found | (digits << jnp.uint32(left))))
        wanted = least(made[:, 0])[:, None] if wanted is None else wanted  # the first end is below all ids
        number = jnp.sum(made[:, 1 : 1 << bits] >= wanted, axis=-1, keepdims=True, dtype=jnp.uint32)
        found = found | (number << jnp.uint32(left))
    return found[:, 0]


def _values(keys: UInt32[Array, ...]) -> Float[Array, ...]:
    """Returns the floats of keys; -inf of those below its own, which are of no number.

    Devices may compare numbers below the smallest normal one as if they were 0. So that one stands for them."""
    lowest, zero, normal = (thresholds.keys_of(jnp.float32(x)) for x in (-jnp.inf, 0.0, jnp.finfo(jnp.float32).tiny))
    keys = jnp.where((keys > zero) & (keys < normal), normal, jnp.maximum(keys, lowest))
    return thresholds.values_of(keys)


def masses(
    logits: Float[Array, "R V"], ends: Float[Array, "R E"], numbers: Float[Array, "R 3"], interpret: bool
) -> Float[Array, "R E"]:
    """Returns the weights of the ids at or above each end. `numbers`: the lowest allowed logit, temperature, and scaled peak."""
    (rows, vocab), many = logits.shape, ends.shape[1]
    span = -(-vocab // (PARTS * BLOCK)) * BLOCK
    parts = -(-vocab // span)
    run = pl.pallas_call(
        lambda *refs: _weigh(span, vocab, *refs),
        grid=(rows, parts),
        out_shape=jax.ShapeDtypeStruct((rows, parts, many), jnp.float32),
        compiler_params=triton.CompilerParams(num_warps=8),
        interpret=interpret,
        name="weigh_ids",
    )
    return jnp.sum(run(logits, ends, numbers), axis=1)


def _weigh(span: int, vocab: int, logits: Any, ends: Any, numbers: Any, out: Any) -> None:
    """Weighs one part of a row."""
    row, part, many = pl.program_id(0), pl.program_id(1), ends.shape[1]
    own, lowest, heat, peak = ends[row, pl.ds(0, many)], numbers[row, 0], numbers[row, 1], numbers[row, 2]

    def turn(at: Any, total: Array) -> Array:
        begin = part * span + at * BLOCK
        there = begin + lax.broadcasted_iota(jnp.int32, (BLOCK,), 0) < vocab
        found = triton.load(logits.at[row, pl.ds(begin, BLOCK)], mask=there, other=-jnp.inf)
        weight = jnp.where(there & (found >= lowest), jnp.exp(found / heat - peak), 0.0)
        return total + jnp.where(found[:, None] >= own[None, :], weight[:, None], 0.0)

    total = lax.fori_loop(0, span // BLOCK, turn, jnp.zeros((BLOCK, many), jnp.float32))
    out[row, part, pl.ds(0, many)] = jnp.sum(total, axis=0)
