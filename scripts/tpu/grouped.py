"""The products of experts: rows sorted by group with their group's matrix, against a plain form, in values, gradients and bits."""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from gpu import packed_rows
from gpu.part import Part

from jaxrl_post.kernels import grouped

EXPERTS, SIDES = 128, (2048, 768)  # of a layer of Qwen3-30B-A3B
ROWS = 2048  # 256 rows, each with 8 experts


def against_reference(
    part: Part,
    experts: int = EXPERTS,
    sides: tuple[int, int] = SIDES,
    count: int = ROWS,
    product: Callable = grouped.product,
) -> None:
    """Compares with products of every row with a matrix of its own in float32. Some experts have no row."""
    if not part.wants("grouped.bits_equal_at_other_places", 15.0):
        return
    keys = jax.random.split(jax.random.key(7), 3)
    rows, slope = (jax.random.normal(key, (count, side), jnp.bfloat16) for key, side in zip(keys, sides))
    matrices = jax.random.normal(keys[2], (experts, *sides), jnp.bfloat16)
    chosen = np.sort(np.random.default_rng(0).integers(1, experts, count) // 2 * 2)
    sizes = jnp.asarray(np.bincount(chosen, minlength=experts), jnp.int32)

    def both(form: Callable) -> Callable:
        def run(x, w, back):
            out, pulled = jax.vjp(form, x, w)
            return out, *pulled(back.astype(out.dtype))

        return jax.jit(run)

    run = both(lambda x, w: product(x, w, sizes))
    found = run(rows, matrices, slope)
    with jax.default_matmul_precision("highest"):
        wide = [x.astype(jnp.float32) for x in (rows, matrices, slope)]
        right = both(lambda x, w: jax.lax.ragged_dot(x, w, sizes))(*wide)
    for name, a, b in zip(("output", "drows", "dmatrices"), found, right, strict=True):
        part.figure(f"grouped.{name}_difference", packed_rows.distance(a, b), at_most=packed_rows.FAR)
    part.figure("grouped.bits_equal_again", packed_rows.same_bits(found, run(rows, matrices, slope)), equals=True)
    # The last expert with rows, alone: its rows then lie first, and no other group has one.
    last = int(chosen[-1])
    mine = jnp.zeros_like(sizes).at[last].set(sizes[last])
    moved = jnp.roll(rows, int(sizes[last]), axis=0)
    alone = jax.jit(lambda x, w: product(x, w, mine))(moved, matrices)[: int(sizes[last])]
    same = packed_rows.same_bits([found[0][count - int(sizes[last]) :]], [alone])
    part.figure("grouped.bits_equal_at_other_places", same, equals=True)
