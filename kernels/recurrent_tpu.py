"""The walk over recurrent rows on TPU, in Pallas.

A visit takes one slot and a block of value heads. Their states come into the chip once. The accepted pending rows and then the
new rows move them there. The states behind the settled rows leave the chip once. Slots without rows are not visited, and
their states stay where they are. New rows of a block of heads lie in the chip while all slots are visited.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from jaxrl_post.kernels.pallas_tpu import in_hbm, pl, pltpu

LANES = 128
BLOCK, LEAST = 16, 8  # value heads of a block, and key heads of one at least, where it has not all
MEMORY = 56 << 20  # of the chip, that a kernel may use
MOST_ROWS = 512
NEEDS = f"float32 states whose sides are {LANES}, and at most {MOST_ROWS} rows"


class Visits(NamedTuple):
    """Of each visit: its slot, the slot whose pending rows lie in the chip, and the numbers of recurrent.Plan. Scalars."""

    slot: Int[Array, " visits"]
    pending: Int[Array, " visits"]
    first: Int[Array, " visits"]
    again: Int[Array, " visits"]
    count: Int[Array, " visits"]
    settled: Int[Array, " visits"]
    begins: Int[Array, " visits"]


def serves(rows: int, key_heads: int, value_heads: int, key_dim: int, value_dim: int) -> bool:
    return rows <= MOST_ROWS and key_dim == value_dim == LANES and value_heads % key_heads == 0


def visits(plan: Any) -> tuple[Visits, Int[Array, ""]]:
    """Returns the walk over slots with rows, and the number of its visits, which is at least 1.

    The pending rows of a slot that repeats none are not fetched: the index stays that of a slot that does.
    """
    live = plan.count > 0
    slot = jnp.nonzero(live, size=len(live), fill_value=0)[0].astype(jnp.int32)
    mine = jax.tree.map(lambda x: x[slot], plan)
    repeats = mine.again > 0
    last = lax.cummax(jnp.where(repeats, jnp.arange(len(live)), -1))
    last = jnp.where(last < 0, jnp.argmax(repeats), last)
    return Visits(slot, slot[last], *mine), jnp.maximum(jnp.sum(live, dtype=jnp.int32), 1)


# ---- index maps: number of a block and of a visit -> which block of an array it works on


def state_at(block: Any, visit: Any, slot: Any, *_: Any) -> tuple:
    return slot[visit], block, 0, 0


def pending_at(block: Any, visit: Any, slot: Any, pending: Any, *_: Any) -> tuple:
    return pending[visit], 0, block, 0


def pending_rates_at(block: Any, visit: Any, slot: Any, pending: Any, *_: Any) -> tuple:
    return pending[visit], block, 0, 0


def rows_at(block: Any, visit: Any, *_: Any) -> tuple:
    return 0, block, 0


def rates_at(block: Any, visit: Any, *_: Any) -> tuple:
    return block, 0, 0


def block_of(key_heads: int, value_heads: int) -> int:
    """Returns the value heads of a block. Rows of fewer key heads than fill a tile are not divided."""
    divides = value_heads % BLOCK == 0 and key_heads * BLOCK % (value_heads * LEAST) == 0
    return BLOCK if divides else value_heads


def walk(
    state: Float[Array, "S H K V"], pending: Any, tokens: Any, plan: Any, interpret: bool = False
) -> tuple[Float[Array, "S H K V"], Float[Array, "R H V"]]:
    """Returns recurrent.walk. `interpret`: runs without a device, in any size."""
    _, H, K, V = state.shape
    (C, h), R = pending.k.shape[1:3], len(tokens.v)
    wide = block_of(h, H)
    keys = wide * h // H
    listed, most = visits(plan)

    def by_block(rates: Array) -> Array:
        """Returns decays or rates [..., rows, H] as [..., blocks, rows, heads of a block]."""
        return jnp.moveaxis(rates.reshape(*rates.shape[:-1], H // wide, wide), -2, -3)

    grid = pltpu.PrefetchScalarGridSpec(
        num_scalar_prefetch=len(listed),
        grid=(H // wide, most),
        in_specs=[
            pl.BlockSpec((None, wide, K, V), state_at),
            pl.BlockSpec((None, C, keys, K), pending_at),
            pl.BlockSpec((None, C, wide, V), pending_at),
            *[pl.BlockSpec((None, None, C, wide), pending_rates_at)] * 2,
            *[pl.BlockSpec((R, keys, K), rows_at)] * 2,
            pl.BlockSpec((R, wide, V), rows_at),
            *[pl.BlockSpec((None, R, wide), rates_at)] * 2,
        ],
        out_specs=[pl.BlockSpec((None, wide, K, V), state_at), pl.BlockSpec((R, wide, V), rows_at)],
        scratch_shapes=[pltpu.VMEM((2, wide, K, V), state.dtype)],
    )
    made = state, jax.ShapeDtypeStruct((R, H, V), state.dtype)
    rates = by_block(pending.g), by_block(pending.beta), by_block(tokens.g), by_block(tokens.beta)
    return pl.pallas_call(
        functools.partial(_kernel, H // h),
        out_shape=[jax.ShapeDtypeStruct(x.shape, x.dtype) for x in made],
        grid_spec=grid,
        input_output_aliases={len(listed): 0},
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel", "arbitrary"), vmem_limit_bytes=None if interpret else MEMORY
        ),
        interpret=interpret,
        name="recurrent_rows",
    )(*listed, in_hbm(state), pending.k, pending.v, *rates[:2], tokens.q, tokens.k, tokens.v, *rates[2:])


def _kernel(shared: int, *refs: Any) -> None:
    """Walks one slot. shared: value heads that share a key.

    Work 0 holds the state behind settled rows, and work 1 that behind drafted ones. One body makes every row.
    """
    listed, (state, old_k, old_v, old_g, old_beta, q, k, v, g, beta, base, out, work) = Visits(*refs[:7]), refs[7:]
    visit = pl.program_id(1)
    first, again, count, settled = (x[visit] for x in (listed.first, listed.again, listed.count, listed.settled))
    work[0] = jnp.where(listed.begins[visit] > 0, 0.0, state[...])

    def turn(at: Any, carry: Any) -> Any:
        number = at - again
        old, row = jnp.minimum(at, old_k.shape[0] - 1), first + jnp.maximum(number, 0)
        before, after = (number > settled).astype(jnp.int32), (number >= settled).astype(jnp.int32)

        def chosen(pending: Any, new: Any) -> Array:
            return jnp.where(number < 0, pending[old], new[row])

        def rate(pending: Any, new: Any) -> Array:
            return jnp.where(number < 0, pending[pl.ds(old, 1)], new[pl.ds(row, 1)])

        values, decay, rates = chosen(old_v, v), jnp.exp(rate(old_g, g)), rate(old_beta, beta)
        keys, queries = chosen(old_k, k).T, q[row].T
        for head in range(values.shape[0]):
            own, place = slice(head, head + 1), slice(head // shared, head // shared + 1)
            kept = work[before, head] * decay[:, own]
            seen = jnp.sum(kept * keys[:, place], axis=0, keepdims=True)
            kept = kept + keys[:, place] * (rates[:, own] * (values[own] - seen))
            work[after, head] = kept
            # A repeated row leaves its place to the first new one.
            out[row, pl.ds(head, 1)] = jnp.sum(kept * queries[:, place], axis=0, keepdims=True)
        return carry

    lax.fori_loop(0, jnp.where(count > 0, again + count, 0), turn, 0)
    base[...] = work[0]
