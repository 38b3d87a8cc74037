"""The one place that imports Pallas for TPUs and jax's ready kernels there: what moves between jax's versions moves
here."""

from __future__ import annotations

from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jax.experimental.pallas.ops.tpu import ragged_paged_attention

__all__ = ["pl", "pltpu", "ragged_paged_attention"]
