"""The walk over a step's recurrent rows: each slot's states move over its accepted pending rows, then over its new rows.

On TPU and on NVIDIA GPUs a kernel (recurrent_tpu.py, recurrent_gpu.py) computes the shapes that its `serves` accepts. It holds
a slot's states in fast memory from the first row to the last. All other shapes, and a CPU, have the caller's reference.

Invariant: one compiled body makes every row, pending or new. So no bit depends on how the steps divide a text.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jaxrl_post.kernels import hardware, recurrent_gpu, recurrent_tpu

KERNELS = {"cuda": recurrent_gpu, "tpu": recurrent_tpu}  # by platform


class Plan(NamedTuple):
    """What a walk needs to know of each slot.

    - first: its first new row. again: its pending rows that were accepted
    - count: its new rows, and `settled` how many of them the kept state moves over. The others come behind them
    - begins: 1 where the state begins with zeros
    """

    first: Int[Array, " S"]
    again: Int[Array, " S"]
    count: Int[Array, " S"]
    settled: Int[Array, " S"]
    begins: Int[Array, " S"]


def walk(
    state: Float[Array, "S H K V"],
    pending: Any,
    tokens: Any,
    plan: Plan,
    reference: Callable,
    platforms: frozenset[str] = hardware.PLATFORMS,
) -> tuple[Float[Array, "S H K V"], Float[Array, "R H V"]]:
    """Returns the states behind settled rows, and what the new rows read. A slot without rows keeps its state.

    What rows of no slot read is not defined.

    Args:
      pending: (k [S, C, h, K], v [S, C, H, V], g [S, C, H], beta [S, C, H]) of kept rows.
      tokens: (q and k [R, h, K], v [R, H, V], g [R, H], beta [R, H]) of new rows.
      reference: the same function of the first four arguments, in jnp.
      platforms: those whose kernel may be used.
    """
    (_, H, *sides), (rows, h, _) = state.shape, tokens.k.shape
    serving = {
        platform: _one_by_one(kernel.walk)
        for platform, kernel in KERNELS.items()
        if platform in platforms and state.dtype == jnp.float32 and kernel.serves(rows, h, H, *sides)
    }
    if not serving:
        return reference(state, pending, tokens, plan)
    if not pending.k.shape[1]:  # a kernel's arrays have a place for a row, which no slot then repeats
        pending = jax.tree.map(lambda x: jnp.zeros((len(x), 1, *x.shape[2:]), x.dtype), pending)
    return jax.lax.platform_dependent(state, pending, tokens, plan, default=reference, **serving)


def _one_by_one(kernel: Callable) -> Callable:
    """Returns the kernel, which under vmap runs once for each element. A grid with one more axis would be another kernel."""
    run = jax.custom_batching.custom_vmap(lambda *given: tuple(kernel(*given)))

    @run.def_vmap
    def mapped(size: int, batched: Any, *given: Any) -> tuple:
        def spread(x: Array, has: bool) -> Array:
            return x if has else jnp.broadcast_to(x, (size, *x.shape))

        given = jax.tree.map(spread, given, tuple(batched))
        if size == 1:
            return jax.tree.map(lambda x: x[None], run(*jax.tree.map(lambda x: x[0], given))), (True, True)
        return jax.lax.map(lambda each: run(*each), given), (True, True)

    return run
