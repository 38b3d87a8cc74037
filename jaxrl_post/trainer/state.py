"""The learner's state and how it begins, and functions of trees of weights: shapes, and copies that the learner owns.

The state is the only tree that changes over time.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from jaxrl_post.models import lora
from jaxrl_post.parallel import mesh as meshes


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class TrainState:
    """The weights, the optimizer's state, and the step.

    - params: {"policy": the trained weights}; beside adapters also {"base": uint32[2]}, which tells the frozen base from
      others (models/lora.py); with a critic also {"critic": tree} (trainer/critic.py)
    - opt_state: optax's, sharded like the weights that each part belongs to; with a critic by the names of params
    - step: int32, optimizer steps taken or skipped

    A reference model is a constant and not part of the state.
    """

    params: Any
    opt_state: Any
    step: Any


def abstract(tree: Any) -> Any:
    """Returns the tree as ShapeDtypeStructs with the shardings of its arrays."""
    return jax.tree.map(lambda x: struct(x, x.sharding), tree)


def struct(x: Any, sharding: jax.sharding.Sharding) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding)


def is_abstract(tree: Any) -> bool:
    return all(isinstance(leaf, jax.ShapeDtypeStruct) for leaf in jax.tree.leaves(tree))


def frozen(tree: Any, shardings: Any) -> Any:
    """Returns `tree` in the learner's layout and its own dtypes. What lies there already is not copied.

    A function of shardings is called instead. ShapeDtypeStructs stay shapes.
    """
    if callable(tree) or is_abstract(tree):
        return tree(shardings) if callable(tree) else jax.tree.map(struct, tree, shardings)

    def placed(leaf: Any, sharding: jax.sharding.Sharding) -> jax.Array:
        there = isinstance(leaf, jax.Array) and leaf.sharding.is_equivalent_to(sharding, leaf.ndim)
        return leaf if there else meshes.put(leaf, sharding)

    return jax.tree.map(placed, tree, shardings)


def owned(tree: Any, shardings: Any) -> Any:
    """Returns a copy of `tree` as float32 or wider in the learner's layout.

    A copy is needed because the state is donated and the caller's arrays are not. A function of shardings is called
    instead. ShapeDtypeStructs stay shapes.
    """

    if callable(tree) or is_abstract(tree):
        return tree(shardings) if callable(tree) else jax.tree.map(struct, tree, shardings)

    def wide(leaf):
        return jnp.array(leaf, jnp.promote_types(leaf.dtype, jnp.float32), copy=True)

    def host(leaf, sharding):
        return meshes.put(np.array(leaf, np.promote_types(leaf.dtype, np.float32)), sharding)

    if all(isinstance(leaf, jax.Array) for leaf in jax.tree.leaves(tree)):
        return jax.jit(lambda t: jax.tree.map(wide, t), out_shardings=shardings)(tree)
    return jax.tree.map(host, tree, shardings)


def moments(transform: optax.GradientTransformation, weights: Any, shardings: Any, rest: jax.sharding.Sharding) -> Any:
    """Returns the optimizer's first state, each part sharded like the weights it belongs to, all others as `rest`.

    ShapeDtypeStructs stay shapes.
    """
    shapes = jax.eval_shape(transform.init, weights)
    homes = optax.tree_utils.tree_map_params(
        transform, lambda _, sharding: sharding, shapes, shardings, transform_non_params=lambda _: rest
    )
    if is_abstract(weights):
        return jax.tree.map(struct, shapes, homes)
    return jax.jit(transform.init, out_shardings=homes)(weights)


def first_state(
    weights: Any, base: Any, shardings: Any, transform: optax.GradientTransformation, mesh: jax.sharding.Mesh
) -> TrainState:
    """Returns the state before the first step. Of shapes it returns shapes.

    Args:
      weights: that are trained.
      base: frozen weights beside them, of which the state keeps a digest; empty where there are none.
      shardings: of `weights`.
    """
    one = meshes.replicated(mesh)
    state = moments(transform, weights, shardings, one)
    if is_abstract(weights):
        which = {"base": jax.ShapeDtypeStruct((2,), np.uint32, sharding=one)} if base else {}
        step = jax.ShapeDtypeStruct((), np.int32, sharding=one)
    else:
        which = {"base": jax.jit(lora.digest, out_shardings=one)(base)} if base else {}
        step = meshes.put(np.int32(0), one)
    return TrainState(params={"policy": weights} | which, opt_state=state, step=step)
