"""Which group each program of a grouped product works on: groups in order, each as often as it needs."""

from __future__ import annotations

import jax.numpy as jnp
from jaxtyping import Array, Int


def listed(counts: Int[Array, " E"], most: int) -> tuple[Int[Array, " most"], Int[Array, " most"]]:
    """Returns the group of each visit, and the visit's number within that group.

    Args:
      counts: visits that each group needs.
      most: at least their sum. The visits behind them are further ones of the last group.
    """
    ends, at = jnp.cumsum(counts), jnp.arange(most, dtype=jnp.int32)
    group = jnp.minimum(jnp.sum(ends[None, :] <= at[:, None], axis=1, dtype=jnp.int32), len(counts) - 1)
    return group, at - (ends - counts)[group]
