"""Attention sinks: what the kernels' online softmax adds for a score that has no value.

A sink is one learned number for each query head. It joins the scores of every softmax of that head, and its share is
dropped: out = sum_j exp(s_j) v_j / (sum_j exp(s_j) + exp(sink)). It is neither scaled nor capped. Source: gpt-oss, arXiv
2508.10925, after StreamingLLM, arXiv 2309.17453.

Invariant: the sink joins after all positions, so the walk over positions is the same with and without one.
"""

from __future__ import annotations

import jax.numpy as jnp
from jaxtyping import Array, Float


def joined(
    peak: Float[Array, "*rows"], mass: Float[Array, "*rows"], sink: Float[Array, "*#rows"]
) -> tuple[Float[Array, "*rows"], Float[Array, "*rows"]]:
    """Returns the factor of the mixed values, and the mass with the sink. Peak and sink are scores of any size."""
    high = jnp.maximum(peak, sink)
    shrink = jnp.exp(peak - high)
    return shrink, mass * shrink + jnp.exp(sink - high)
