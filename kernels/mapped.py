"""A kernel under vmap: it runs once for each element. A grid with one more axis would be another kernel, with other bits."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax


def alone(run: Callable) -> Callable:
    """Returns `run`, a function of trees of arrays, such that vmap calls it with the arrays of one element.

    Arrays without the mapped axis are the same in every call. All results have the axis."""
    once = jax.custom_batching.custom_vmap(run)

    @once.def_vmap
    def mapped(size: int, batched: Any, *given: Any) -> tuple[Any, Any]:
        leaves, tree = jax.tree.flatten(given)
        has = jax.tree.leaves(batched)

        def called(own: list) -> Any:
            own = iter(own)
            return once(*tree.unflatten([next(own) if one else x for x, one in zip(leaves, has, strict=True)]))

        own = [x for x, one in zip(leaves, has, strict=True) if one]
        alone = size == 1  # no loop of one turn
        made = jax.tree.map(lambda x: x[None], called([x[0] for x in own])) if alone else jax.lax.map(called, own)
        return made, jax.tree.map(lambda _: True, made)

    return once
