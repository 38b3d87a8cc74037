"""The walk over recurrent rows on NVIDIA GPUs, in Pallas-Triton.

A program takes one slot, one value head and WIDE columns of its state, which do not depend on other columns. The columns stay
in registers from the first accepted pending row to the last new row. A program of a slot without rows ends at once, and its
state stays where it is.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

from jaxrl_post.kernels.pallas_triton import pl, triton

WIDE = 32  # columns of a program
WARPS = 4
SIDES = (64, 128)
NEEDS = f"float32 states whose sides are {' or '.join(map(str, SIDES))}"


def serves(rows: int, key_heads: int, value_heads: int, key_dim: int, value_dim: int) -> bool:
    return key_dim in SIDES and value_dim in SIDES and value_heads % key_heads == 0


def state_at(slot: Any, head: Any, block: Any, wide: int = WIDE) -> tuple:
    """Returns the part of the states that a program reads and writes. Only one whose slot has rows does."""
    return slot, head, slice(None), pl.ds(block * wide, wide)


def walk(
    state: Float[Array, "S H K V"], pending: Any, tokens: Any, plan: Any, interpret: bool = False
) -> tuple[Float[Array, "S H K V"], Float[Array, "R H V"]]:
    """Returns recurrent.walk. `interpret`: runs without a device, in any size."""
    S, H, _, V = state.shape
    wide = min(WIDE, V)
    made = state, jax.ShapeDtypeStruct((len(tokens.v), H, V), state.dtype)
    return pl.pallas_call(
        functools.partial(_kernel, H // tokens.k.shape[1], wide),
        grid=(S, H, V // wide),
        out_shape=[jax.ShapeDtypeStruct(x.shape, x.dtype) for x in made],
        input_output_aliases={len(plan): 0},
        compiler_params=triton.CompilerParams(num_warps=WARPS, num_stages=1),
        interpret=interpret,
        name="recurrent_rows",
    )(*plan, state, *pending, *tokens)


def _kernel(shared: int, wide: int, *refs: Any) -> None:
    """Walks the rows of one slot. shared: value heads that share a key."""
    plan, (state, old_k, old_v, old_g, old_beta, q, k, v, g, beta, base, out) = refs[:5], refs[5:]
    slot, head, block = (pl.program_id(axis) for axis in range(3))
    first, again, count, settled, begins = (x[slot] for x in plan)

    @pl.when(count > 0)
    def _():
        place, columns = state_at(slot, head, block, wide), pl.ds(block * wide, wide)
        key = lax.div(head, jnp.asarray(shared, head.dtype))
        start = state[place]
        start = jnp.where(begins > 0, jnp.zeros_like(start), start)

        @pl.when(again + settled == 0)
        def _():
            base[place] = start

        def turn(at: Any, kept: Array) -> Array:
            number = at - again
            old, row = jnp.minimum(at, old_k.shape[1] - 1), first + jnp.maximum(number, 0)

            def loaded(at: Any, here: Any) -> Array:
                return triton.load(at, mask=jnp.broadcast_to(here, at.shape), other=0.0)

            def chosen(pending: Any, new: Any, *where: Any) -> Array:
                both = pending.at[(slot, old, *where)], new.at[(row, *where)]
                return jnp.where(number < 0, loaded(both[0], number < 0), loaded(both[1], number >= 0))

            whole = pl.ds(0, old_k.shape[3])
            keys, values = chosen(old_k, k, key, whole), chosen(old_v, v, head, columns)
            decay = jnp.exp(jnp.where(number < 0, old_g[slot, old, head], g[row, head]))
            rate = jnp.where(number < 0, old_beta[slot, old, head], beta[row, head])
            kept = kept * decay
            seen = jnp.sum(kept * keys[:, None], axis=0)
            kept = kept + keys[:, None] * (rate * (values - seen))[None, :]
            reads = jnp.sum(kept * q[row, key, whole][:, None], axis=0)
            triton.store(out.at[row, head, columns], reads, mask=jnp.broadcast_to(number >= 0, reads.shape))

            @pl.when(number == settled - 1)
            def _():
                base[place] = kept

            return kept

        lax.fori_loop(0, again + count, turn, start)
