"""Random weights, drawn on the device."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from jaxrl_post.models import decoder


def drawn(model: decoder.ModelConfig, dtype: Any = jnp.bfloat16, shardings: Any = None) -> Any:
    """Returns weights: vectors are 1, and matrices have a standard deviation of 0.02.

    Args:
      shardings: of each leaf, a tree like the weights. None: jax's default device.
    """
    leaves, tree = jax.tree.flatten(decoder.abstract(model))
    homes = [None] * len(leaves) if shardings is None else jax.tree.leaves(shardings)
    return tree.unflatten(_leaf(i, x.shape, dtype, home) for i, (x, home) in enumerate(zip(leaves, homes, strict=True)))


def _leaf(number: int, shape: tuple[int, ...], dtype: Any, home: Any) -> jax.Array:
    if len(shape) == 1:
        return jnp.ones(shape, dtype, device=home)
    draw = jax.jit(lambda key: 0.02 * jax.random.normal(key, shape, dtype), out_shardings=home)
    return draw(jax.random.key(number))
