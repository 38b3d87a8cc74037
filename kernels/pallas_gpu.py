"""The one place that imports Pallas for NVIDIA GPUs (Mosaic GPU): what moves between jax's versions moves here."""

from __future__ import annotations

from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

__all__ = ["pl", "plgpu"]
