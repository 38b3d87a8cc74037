"""Thresholds of top-k and top-p on TPU: the logits of eight rows lie in the chip's own memory, and are read there 64 times.

They arrive once. The law, ties and the order of floats are those of kernels/thresholds.py. Sums of weights are added lane by
lane, chunk after chunk, so a row's result depends on that row alone. Refuses shapes for which `serves` is False.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float, Int, UInt32

from jaxrl_post.kernels.pallas_tpu import pl, pltpu

ROWS = 8
LANES = 128
CHUNK = 8 * LANES  # ids that one turn takes
MOST = 400_000  # ids: eight rows four times, as logits that arrive twice, keys and weights, take less than 52 MB
NEEDS = f"a multiple of {LANES} ids, at least {CHUNK} and at most {MOST}, on one device"
LOWEST_KEY = np.int32(-(1 << 31))


def serves(rows: int, vocab: int) -> bool:
    return vocab % LANES == 0 and CHUNK <= vocab <= MOST


def keys(
    logits: Float[Array, "R V"],
    temperatures: Float[Array, " R"],
    top_k: Int[Array, " R"],
    top_p: Float[Array, " R"],
    *,
    interpret: Any = False,
) -> UInt32[Array, " R"]:
    """Returns thresholds.keys_of the lowest allowed logit: that of top-k where top_p >= 1, and 0 where neither cuts."""
    rows, vocab = logits.shape
    # As integers: a small top-k would be a float that a device may take for 0.
    wanted = jnp.stack([*(lax.bitcast_convert_type(x, jnp.int32) for x in (temperatures, top_p)), top_k], axis=1)
    found = pl.pallas_call(
        _kernel(vocab),
        grid=(-(-rows // ROWS),),
        in_specs=[pl.BlockSpec((ROWS, vocab), lambda r: (r, 0)), pl.BlockSpec((ROWS, 3), lambda r: (r, 0))],
        out_specs=pl.BlockSpec((ROWS, LANES), lambda r: (r, 0)),
        out_shape=jax.ShapeDtypeStruct((rows, LANES), jnp.int32),
        scratch_shapes=[pltpu.VMEM((ROWS, vocab), jnp.int32), pltpu.VMEM((ROWS, vocab), jnp.float32)],
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel",), vmem_limit_bytes=16 * ROWS * vocab + (4 << 20)
        ),
        interpret=interpret,
    )(logits, wanted)
    return lax.bitcast_convert_type(found[:, 0], jnp.uint32)


def _kernel(vocab: int) -> Callable:
    added = _walk(vocab)

    def kernel(logits_ref, wanted_ref, out_ref, keys_ref, weights_ref):
        heat, top_p = (lax.bitcast_convert_type(wanted_ref[:, at : at + 1], jnp.float32) for at in (0, 1))
        heat, top_k = jnp.where(heat == 0, 1.0, heat), wanted_ref[:, 2:3]
        fewest = jnp.where(top_k > 0, jnp.minimum(top_k, vocab), vocab)

        def keyed(logits, at, own):
            bits = lax.bitcast_convert_type(jnp.where(logits == 0, 0.0, logits), jnp.int32)  # zeros of both signs tie
            keys_ref[:, at] = bits ^ ((bits >> 31) & np.int32(0x7FFFFFFF))  # signed integers in the order of the floats
            return logits

        def counted(lowest):
            total = added(keys_ref, lambda keys, at, own: jnp.where(own & (keys >= lowest), 1, 0), zeros)
            return jnp.sum(total, axis=1, keepdims=True) >= fewest

        zeros, nothing = (jnp.zeros((ROWS, CHUNK), dtype) for dtype in (jnp.int32, jnp.float32))
        peak = jnp.max(added(logits_ref, keyed, nothing - jnp.inf, jnp.maximum), axis=1, keepdims=True)
        of_k = jnp.where(top_k > 0, _largest(counted), 0)

        def weighed(logits, at, own):
            there = own & (keys_ref[:, at] >= (of_k ^ LOWEST_KEY))
            weight = jnp.where(there, jnp.exp(logits / heat - peak / heat), 0.0)
            # Columns of an earlier chunk keep what that chunk wrote.
            weights_ref[:, at] = jnp.where(own, weight, weights_ref[:, at])
            return weight

        enough = top_p * jnp.sum(added(logits_ref, weighed, nothing), axis=1, keepdims=True)

        def massed(lowest):
            def term(keys, at, own):
                return jnp.where(own & (keys >= lowest), weights_ref[:, at], 0.0)

            return jnp.sum(added(keys_ref, term, nothing), axis=1, keepdims=True) >= enough

        of_p = _largest(massed)
        higher = jnp.where((of_p ^ LOWEST_KEY) > (of_k ^ LOWEST_KEY), of_p, of_k)
        out_ref[...] = jnp.broadcast_to(jnp.where(top_p < 1, higher, of_k), (ROWS, LANES))

    return kernel


def _walk(vocab: int) -> Callable:
    """Returns `added(ref, term, start, join)`: `join` over all chunks of term(numbers, place, own), lane by lane [ROWS, CHUNK].

    The last chunk begins further left, where ids are no multiple of CHUNK. `own`: the columns that no earlier chunk has."""

    def added(ref: Any, term: Callable, start: Array, join: Callable = jnp.add) -> Array:
        def turn(chunk, total):
            begin = pl.multiple_of(jnp.minimum(chunk * CHUNK, vocab - CHUNK), LANES)
            at = pl.ds(begin, CHUNK)
            own = begin + lax.broadcasted_iota(jnp.int32, (ROWS, CHUNK), 1) >= chunk * CHUNK
            return join(total, term(ref[:, at], at, own))

        return lax.fori_loop(0, -(-vocab // CHUNK), turn, start)

    return added


def _largest(enough: Callable[[Array], Array]) -> Array:
    """Returns the largest key [ROWS, 1] for which the ids at or above it are enough. `enough` takes keys as signed integers."""

    def turn(number, found):
        higher = found | lax.shift_left(np.int32(1), np.int32(31) - number)
        return jnp.where(enough(higher ^ LOWEST_KEY), higher, found)

    return lax.fori_loop(0, 32, turn, jnp.zeros((ROWS, 1), jnp.int32))
