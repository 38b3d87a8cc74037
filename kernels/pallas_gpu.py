"""The only import of Pallas for NVIDIA GPUs (Mosaic GPU); names that move between versions of jax are fixed here."""

from __future__ import annotations

from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

__all__ = ["pl", "plgpu"]
