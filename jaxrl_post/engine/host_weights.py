"""Weights of a row engine that wait in host memory while it has nothing to do.

Invariant: the engine gets back the bits that it had. Each process keeps the pieces of its own devices.
"""

from __future__ import annotations

from typing import Any

import jax
import numpy as np

from jaxrl_post.engine.row_engine import Held, RowEngine, drop


class HostWeights:
    """Takes the weights of an engine off its devices, and brings them back.

    Args:
      engine: without requests. Nobody else uses its weights, which are freed.
    """

    def __init__(self, engine: RowEngine):
        self._engine = engine
        self._kept = jax.tree.map(_Kept, engine.device.params)
        self.rest()

    def wake(self) -> None:
        """Brings the weights to the devices, with empty pages."""
        params = jax.tree.map(_Kept.placed, self._kept)
        self._engine.take_up(Held(params, owned=False), self._engine.version)

    def rest(self) -> None:
        """Frees weights and pages on the devices. The engine has no requests."""
        self._engine.admission.rest()
        drop(self._engine.lay_down().params)


class _Kept:
    """The pieces of an array that lie on devices of this process, by their place in it."""

    def __init__(self, array: jax.Array):
        self.shape, self.sharding = array.shape, array.sharding
        # A copy: on a CPU the array's own memory is freed
        self.pieces = {str(one.index): np.array(one.data) for one in array.addressable_shards}

    def placed(self) -> Any:
        """Returns the array on its devices."""
        pieces = [
            jax.device_put(self.pieces[str(index)].copy(), device)  # a copy: a CPU device may use the memory itself
            for device, index in self.sharding.addressable_devices_indices_map(self.shape).items()
        ]
        return jax.make_array_from_single_device_arrays(self.shape, self.sharding, pieces)
