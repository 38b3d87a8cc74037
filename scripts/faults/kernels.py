"""Faults of kernels/: thresholds."""

from __future__ import annotations

from faults.fault import in_file

FAULTS = (
    *in_file(
        "kernels/thresholds.py",
        (
            "top_p_must_be_exceeded",
            "find",
            "jnp.sum(jnp.where(seen, weight, 0.0), axis=-1) >= enough",
            "jnp.sum(jnp.where(seen, weight, 0.0), axis=-1) > enough",
            "a share that is met exactly is not enough",
            "test_a_share_that_is_met_exactly_is_enough",
        ),
    ),
)
