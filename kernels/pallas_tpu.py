"""The only import of Pallas for TPUs and of jax's kernels there; names that move between versions of jax are fixed
here.
"""

from __future__ import annotations

from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jax.experimental.pallas.ops.tpu import splash_attention
from jax.experimental.pallas.ops.tpu.splash_attention.splash_attention_mask import MultiHeadMask
from jaxtyping import Array

__all__ = ["MultiHeadMask", "in_hbm", "pl", "pltpu", "splash_attention"]


def in_hbm(x: Array) -> Array:
    """Returns `x` for a kernel that reads parts of it from the device's memory.

    Without it XLA may move all of `x` into the chip before the kernel, where it finds room there, and back after it."""
    return pltpu.with_memory_space_constraint(x, pltpu.HBM)
