"""The one tree that changes over time."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import jax


@functools.partial(jax.tree_util.register_dataclass, data_fields=["params", "opt_state", "step"], meta_fields=[])
@dataclass(frozen=True, kw_only=True)
class TrainState:
    """`params`: {"policy": tree} (a critic would stand beside it); `opt_state`: optax's, sharded like the weights it
    belongs to; `step`: int32, optimizer steps taken or skipped. A reference model is a constant, not state."""

    params: Any
    opt_state: Any
    step: Any
