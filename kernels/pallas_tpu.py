"""The only import of Pallas for TPUs and of jax's kernels there; names that move between versions of jax are fixed
here.
"""

from __future__ import annotations

from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jax.experimental.pallas.ops.tpu import splash_attention
from jax.experimental.pallas.ops.tpu.splash_attention.splash_attention_mask import MultiHeadMask

__all__ = ["MultiHeadMask", "pl", "pltpu", "splash_attention"]
