"""The state that a learner begins with: where its weights and moments lie, and which of them decay."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
import optax

from jaxrl_post.models import decoder, lora
from jaxrl_post.parallel import mesh as meshes
from jaxrl_post.trainer import optimizer as optimizers
from jaxrl_post.trainer.state import TrainState, is_abstract, struct


def placement(model: decoder.ModelConfig, mesh: jax.sharding.Mesh) -> tuple[Any, Any]:
    """Returns the sharding of every leaf of a policy, and which trained weights decay. Additions all do, as in PEFT."""
    if model.lora is None:
        axes = decoder.axes(model)
        return meshes.param_shardings(mesh, axes, "learner"), optimizers.matrices(axes)
    axes = lora.axes(model)
    homes = (meshes.param_shardings(mesh, part, "learner") for part in (axes.base, axes.adapter))
    where = lora.Adapted(*homes, model.lora)
    return where, jax.tree.map(lambda _: True, where.adapter)


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
    shapes = jax.eval_shape(transform.init, weights)
    homes = optax.tree_utils.tree_map_params(
        transform, lambda _, sharding: sharding, shapes, shardings, transform_non_params=lambda _: one
    )
    if is_abstract(weights):
        which = {"base": jax.ShapeDtypeStruct((2,), np.uint32, sharding=one)} if base else {}
        return TrainState(
            params={"policy": weights} | which,
            opt_state=jax.tree.map(struct, shapes, homes),
            step=jax.ShapeDtypeStruct((), np.int32, sharding=one),
        )
    which = {"base": jax.jit(lora.digest, out_shardings=one)(base)} if base else {}
    moments = jax.jit(transform.init, out_shardings=homes)(weights)
    return TrainState(params={"policy": weights} | which, opt_state=moments, step=meshes.put(np.int32(0), one))
