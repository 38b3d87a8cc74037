"""The engine's device in a job where whole processes learn and whole processes generate.

All processes run the same RowEngine on the host and take the same decisions. Programs of the engine run in the processes
that have its devices. One of them tells the results of a dispatch to the processes that have none, without a device of
the learner: it would first finish what it computes.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np

from jaxrl_post.engine.host.device import DispatchOrder
from jaxrl_post.engine.host.wire import DispatchResult, Entry, Sizes
from jaxrl_post.engine.row_engine import EngineSettings, MeshDevice
from jaxrl_post.engine.speculation.interface import Drafter
from jaxrl_post.models import decoder
from jaxrl_post.parallel import mesh as meshes
from jaxrl_post.parallel import relay, weight_sync
from jaxrl_post.types import Layout


def device(learner: jax.sharding.Mesh, relays: relay.Relays, *given: Any) -> MeshDevice | DistantDevice:
    """Returns the device of this process for an engine beside a learner of other processes.

    Args:
      given: the arguments of MeshDevice.
    """
    mesh = given[2]
    results = relays.open("dispatch", min(meshes.processes(mesh)))
    layout = functools.partial(_layout, relays, min(meshes.processes(learner)))
    kind = TellingDevice if meshes.is_here(mesh) else DistantDevice
    return kind(results, layout, *given)


def _layout(
    relays: relay.Relays, teller: int, model: decoder.ModelConfig, params: Any, mesh: jax.sharding.Mesh, dtype: Any
) -> weight_sync.CrossingLayout:
    """Returns what brings the weights; see merged_weights.layout. `teller`: a process with a device of the learner."""
    homes = meshes.param_shardings(mesh, decoder.axes(model), "engine")
    return weight_sync.CrossingLayout(homes, dtype, relays, teller)


class TellingDevice(MeshDevice):
    """A MeshDevice whose results are told to processes that have none of its devices."""

    def __init__(self, results: relay.Relay, layout: Callable[..., weight_sync.WeightLayout], *given: Any):
        super().__init__(*given, layout=layout)
        self._results = results

    def dispatch(self, order: DispatchOrder) -> Callable[[], DispatchResult]:
        """Starts a dispatch; see RowDevice."""
        wait = super().dispatch(order)

        def told() -> DispatchResult:
            result = wait()
            if self._results.tells:
                self._results.tell(relay.packed(result))
            return result

        return told


class DistantDevice:
    """A RowDevice in a process without any of the engine's devices: it computes nothing, and hears what others compute."""

    watched = 0

    def __init__(
        self,
        results: relay.Relay,
        layout: Callable[..., weight_sync.WeightLayout],
        model: decoder.ModelConfig,
        params: Any,
        mesh: jax.sharding.Mesh,
        sizes: Sizes,
        settings: EngineSettings,
        drafter: Drafter,
    ):
        self._results = results
        self.layout = Layout(sizes.replicas, mesh.shape[meshes.TENSOR])
        self._sync = layout(model, params, mesh, settings.dtype)
        self.case, self.links = self._sync.case(params), self._sync.links(params)
        self.params = self._sync.place(params)

    def put(self, entry: Entry, drafts: bool) -> None:
        """Does nothing here; see RowDevice."""

    def teach(self, pieces: Sequence[tuple[int, int, tuple[np.ndarray, ...]]], rates: np.ndarray) -> None:
        """Does nothing here; see RowDevice."""

    def prefill(self, tiles: np.ndarray) -> None:
        """Does nothing here; see RowDevice."""

    def dispatch(self, order: DispatchOrder) -> Callable[[], DispatchResult]:
        """Returns what waits for the result of the others; see RowDevice."""
        return lambda: DispatchResult(*relay.unpacked(self._results.hear()))

    def exchange(self, params: Any) -> None:
        """Gives the learner's weights to the others; see RowDevice."""
        self._sync.check(self.params, params)
        self.params = self._sync.replace(self.params, params)

    def relayout(self, layout: Layout) -> None:
        """Accepts the compiled layout; see RowDevice."""
        if layout != self.layout:
            raise ValueError(f"engine: {layout} was requested, only {self.layout} was compiled")
