"""The state that a learner begins with."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
import optax

from jaxrl_post.models import lora
from jaxrl_post.parallel import mesh as meshes
from jaxrl_post.trainer.state import TrainState, is_abstract, moments


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
