"""The only import of Pallas for NVIDIA GPUs (Mosaic GPU); names that move between versions of jax are fixed here."""

from __future__ import annotations

from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

__all__ = ["RECENT", "pl", "plgpu"]

# The Mosaic GPU of jax 0.11 and later. That of 0.10 has not compiled kernels of several groups of threads.
RECENT = hasattr(plgpu, "InterpretGPUParams")
