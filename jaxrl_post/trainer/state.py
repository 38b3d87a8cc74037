"""The one tree that changes over time, and trees of weights: as shapes, and as copies that the learner owns."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxrl_post.parallel import mesh as meshes


@functools.partial(jax.tree_util.register_dataclass, data_fields=["params", "opt_state", "step"], meta_fields=[])
@dataclass(frozen=True, kw_only=True)
class TrainState:
    """`params`: {"policy": tree} (a critic would stand beside it); `opt_state`: optax's, sharded like the weights it
    belongs to; `step`: int32, optimizer steps taken or skipped. A reference model is a constant, not state."""

    params: Any
    opt_state: Any
    step: Any


def abstract(tree: Any) -> Any:
    """Shapes, and where they lie."""
    return jax.tree.map(lambda x: struct(x, x.sharding), tree)


def struct(x: Any, sharding: jax.sharding.Sharding) -> jax.ShapeDtypeStruct:
    """The shape of one leaf, if it lay so."""
    return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding)


def is_abstract(tree: Any) -> bool:
    """Whether it has shapes alone."""
    return all(isinstance(leaf, jax.ShapeDtypeStruct) for leaf in jax.tree.leaves(tree))


def owned(tree: Any, shardings: Any) -> Any:
    """A copy of `tree` as float32 or wider in the learner's layout: the state is donated, the caller's arrays are
    not."""

    def host(leaf, sharding):
        return meshes.put(np.array(leaf, np.promote_types(leaf.dtype, np.float32)), sharding)

    if callable(tree):
        return tree(shardings)
    if is_abstract(tree):
        return jax.tree.map(struct, tree, shardings)
    if all(isinstance(leaf, jax.Array) for leaf in jax.tree.leaves(tree)):

        def wide(leaf):
            return jnp.array(leaf, jnp.promote_types(leaf.dtype, jnp.float32), copy=True)

        return jax.jit(lambda t: jax.tree.map(wide, t), out_shardings=shardings)(tree)
    return jax.tree.map(host, tree, shardings)
