"""The engine's device in a job where whole processes learn and whole processes generate.

All processes run the same RowEngine on the host and take the same decisions. Programs of the engine run in the processes
that have its devices. One of them tells the results of a dispatch to the processes that have none, without a device of
the learner: it would first finish what it computes.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax

from jaxrl_post.engine.host.device import DispatchOrder
from jaxrl_post.engine.host.wire import DispatchResult, EngineSettings
from jaxrl_post.engine.row_engine import MeshDevice
from jaxrl_post.engine.speculation.interface import Drafter
from jaxrl_post.kernels import eight_bits
from jaxrl_post.models import decoder
from jaxrl_post.parallel import exchange, weight_sync
from jaxrl_post.parallel import mesh as meshes
from jaxrl_post.ring.types import Layout


def device(learner: jax.sharding.Mesh, relays: exchange.Relays, *given: Any) -> MeshDevice | DistantDevice:
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
    relays: exchange.Relays,
    sender: int,
    model: decoder.ModelConfig,
    params: Any,
    mesh: jax.sharding.Mesh,
    dtype: Any,
    weights: str,
) -> weight_sync.CrossingLayout:
    """Returns what brings the weights; see merged_weights.layout. `sender`: a process with a device of the learner."""
    assert weights == eight_bits.AUTO, "codes do not cross between processes"
    homes = meshes.param_shardings(mesh, decoder.axes(model), "engine")
    return weight_sync.CrossingLayout(homes, dtype, relays, sender)


class TellingDevice(MeshDevice):
    """A MeshDevice whose results are told to processes that have none of its devices."""

    def __init__(self, results: exchange.Relay, layout: Callable[..., weight_sync.WeightLayout], *given: Any):
        super().__init__(*given, layout=layout)
        self._results = results

    def dispatch(self, order: DispatchOrder) -> Callable[[], DispatchResult]:
        wait = super().dispatch(order)

        def told() -> DispatchResult:
            result = wait()
            if self._results.sends:
                self._results.send(exchange.packed(result))
            return result

        return told


class DistantDevice:
    """A RowDevice in a process without any of the engine's devices: it computes nothing, and hears what others compute."""

    watched = 0

    def __init__(
        self,
        results: exchange.Relay,
        layout: Callable[..., weight_sync.WeightLayout],
        model: decoder.ModelConfig,
        params: Any,
        mesh: jax.sharding.Mesh,
        sizes: EngineSettings,
        drafter: Drafter,
    ):
        self._results = results
        self.layout = Layout(sizes.replicas, mesh.shape[meshes.TENSOR], mesh.shape[meshes.EXPERT])
        self._sync = layout(model, params, mesh, sizes.dtype, sizes.weights)
        self.case, self.links = self._sync.case(params), self._sync.links(params)
        self.params = self._sync.place(params)

    def _nothing(self, *given: Any) -> None:
        """Does nothing here."""

    put = teach = prefill = _nothing

    def dispatch(self, order: DispatchOrder) -> Callable[[], DispatchResult]:
        """Returns what waits for the result of the others."""
        return lambda: DispatchResult(*exchange.unpacked(self._results.receive()))

    def exchange(self, params: Any, finite: Any = None) -> None:
        """Gives the learner's weights to the others."""
        self._sync.check(self.params, params, finite)
        self.params = self._sync.replace(self.params, params)

    def relayout(self, layout: Layout) -> None:
        if layout != self.layout:
            raise ValueError(f"engine: {layout} was requested, only {self.layout} was compiled")
