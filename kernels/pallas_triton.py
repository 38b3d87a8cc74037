"""The only import of Pallas-Triton; names that move between versions of jax are fixed here."""

from __future__ import annotations

from jax.experimental import pallas as pl
from jax.experimental.pallas import triton

__all__ = ["pl", "triton"]
