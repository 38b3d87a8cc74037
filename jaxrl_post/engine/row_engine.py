"""The row engine: the host side (engine/host/row_host.py) over compiled programs and weights on a mesh.

Invariant: the host decides when a token is computed. The programs decide which token, from weights, text, seed and
sampling law alone. The engine refuses sizes that do not fit the model, and it never recompiles.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import jax
import numpy as np

from jaxrl_post.engine import between_products, compiled, merged_weights
from jaxrl_post.engine import step_cost as costs
from jaxrl_post.engine.eight_bit_weights import held_bytes, stored
from jaxrl_post.engine.host import sequence
from jaxrl_post.engine.host.admission import Admission
from jaxrl_post.engine.host.device import DispatchOrder
from jaxrl_post.engine.host.row_host import RowHost
from jaxrl_post.engine.host.swap_policy import SwapPolicy
from jaxrl_post.engine.host.wire import DispatchResult, EngineSettings, Entry
from jaxrl_post.engine.speculation.interface import Drafter
from jaxrl_post.engine.speculation.speculation import Drafting
from jaxrl_post.models import cache_kinds, decoder
from jaxrl_post.parallel import mesh as meshes
from jaxrl_post.ring.types import Layout


class EngineWeights(NamedTuple):
    """Weights, and whether the engine alone uses them."""

    params: Any
    owned: bool


class MeshDevice:
    """A RowDevice of compiled programs on a mesh. Holds weights, KV cache, texts and the drafter's tables.

    `layout`: makes what brings the weights; see merged_weights.layout.
    """

    def __init__(
        self,
        model: decoder.ModelConfig,
        params: Any,
        mesh: jax.sharding.Mesh,
        sizes: EngineSettings,
        drafter: Drafter,
        layout: Callable[..., Any] = merged_weights.layout,
    ):
        self.layout = Layout(sizes.replicas, mesh.shape[meshes.TENSOR], mesh.shape[meshes.EXPERT])
        self._sync = layout(model, params, mesh, sizes.dtype, sizes.weights)
        self.case = self._sync.case(params)  # how weights reach the engine
        self.links = self._sync.links(params)  # bytes of a swap, by link
        self.params = self._sync.place(params)
        self.owned = self.params is not params
        self.programs = compiled.Programs(stored(model, sizes.weights), mesh, sizes, drafter)
        self.programs.compile(self.params)
        self.state, self.tables = self.programs.blank()
        self.watched = self.programs.watched(drafter)

    def put(self, entry: Entry, drafts: bool) -> None:
        self.state = self.programs.insert(self.state, entry, drafts)

    def teach(self, pieces: Sequence[tuple[int, int, tuple[np.ndarray, ...]]], rates: np.ndarray) -> None:
        for piece in pieces:
            self.tables = self.programs.upload(self.tables, *piece)
        self.tables = self.programs.rated(self.tables, rates)

    def dispatch(self, order: DispatchOrder) -> Callable[[], DispatchResult]:
        self.state, result = self.programs.dispatch(order, self.params, self.tables, self.state)
        return functools.partial(compiled.read, result)

    def prefill(self, tiles: np.ndarray) -> None:
        self.state = self.programs.prefill(self.params, self.state, tiles)

    def exchange(self, params: Any, finite: Any = None) -> None:
        self._sync.check(self.params, params, finite)
        if self.state is None:  # asleep
            self.params = self._sync.place(params)
            self.state, self.tables = self.programs.blank()
        else:
            self.params = self._sync.replace(self.params, params, self.owned)
        self.owned = self.params is not params

    def relayout(self, layout: Layout) -> None:
        if layout != self.layout:
            raise ValueError(
                f"engine: {layout} was requested, only {self.layout} was compiled; name others in engine.layouts"
            )

    def sleep(self) -> None:
        """Frees pages, tables and the engine's own weights until the next `exchange`. Their shapes are kept."""
        if self.state is None:
            return
        held = self.release_weights()
        self.params = jax.eval_shape(lambda: held.params)
        self._sync.free(*held)

    def release_weights(self) -> EngineWeights:
        """Frees pages and tables and returns the weights. Nothing is left on a device until `restore_weights`."""
        drop((self.state, self.tables))
        held = EngineWeights(self.params, self.owned)
        self.params = self.state = self.tables = None
        return held

    def restore_weights(self, held: EngineWeights) -> None:
        """Takes weights that a device of another layout released, and allocates empty pages and tables.

        Weights that the other engine owned are used up."""
        assert self.params is None, "the device holds weights already"
        self.params, self.owned = self._sync.bring(held.params, held.owned)
        self.state, self.tables = self.programs.blank()


class RowEngine(RowHost):
    """A protocols.Engine over the row program, with mesh data * fsdp replicas.

    Args:
      cost: step-cost table; None: the analytic table of this kind of device.
      decode: decode(ids, before=ids of what they continue) gives text, for stop strings; None: requests with stop strings are refused.
      drafting: host side of speculative decoding; None: never drafts.
      swap_policy: what becomes of running rollouts at a swap; None: they keep tokens and KV.
      device: makes the device: MeshDevice, or one of engine/whole_hosts.py.

    Raises:
      ValueError: the mesh does not divide the model, or the sizes do not fit the model or each other.
    """

    device: MeshDevice

    def __init__(
        self,
        model: decoder.ModelConfig,
        params: Any,
        mesh: jax.sharding.Mesh,
        sizes: EngineSettings,
        *,
        cost: costs.StepCost | None = None,
        decode: Callable[..., str] | None = None,
        version: int = 0,
        drafting: Drafting | None = None,
        swap_policy: SwapPolicy | None = None,
        device: Callable[..., MeshDevice] = MeshDevice,
    ):
        heads = {"heads": model.heads, "kv_heads": cache_kinds.whole_heads(model.kept)}
        meshes.check_divisible(mesh, decoder.axes(model), decoder.abstract(model), "engine", heads)
        if sizes.max_length > model.max_length:
            raise ValueError(
                f"engine.max_length={sizes.max_length} is beyond the model's {model.max_length} positions; the "
                f"nearest valid value is {model.max_length}"
            )
        recurrent = bool(cache_kinds.states(model.kept))
        sizes = replace(sizes, replicas=meshes.replicas(mesh), recurrent=recurrent)
        sizes = between_products.resolved(model, mesh, sizes)
        sequence.check_sizes(sizes)  # before anything is compiled
        drafting = drafting or Drafting(
            Drafter(), replicas=sizes.replicas, slots=sizes.slots, past=lambda prompt_id: ()
        )
        super().__init__(
            device(model, params, mesh, sizes, drafting.drafter),
            sizes,
            cost=cost or _analytic(model, sizes),
            vocab_size=model.vocab_size,
            drafting=drafting,
            decode=decode,
            version=version,
            swap_policy=swap_policy,
        )

    @property
    def layout(self) -> Layout:
        return self.device.layout

    def warm_up_swap(self, params: Any) -> None:
        """Swaps to these weights under the present version, so that later swaps compile nothing."""
        self.device.exchange(params)

    def sleep(self) -> None:
        """Frees what the engine alone holds on devices, until the next swap.

        Running sequences are computed again from their tokens then, and sample the same tokens."""
        prompts = {one.request.prompt.id: one.request.prompt for one in self.sequences.values()}
        state = self.state_dict()
        self.device.sleep()
        self.load_state_dict(state, prompts)

    def restart(self) -> None:
        """Forgets every request and begins with empty pages and tables, whatever an error has left of a dispatch."""
        drop((self.device.state, self.device.tables))
        self.device.state, self.device.tables = self.device.programs.blank()
        self.admission = Admission(self.sizes, self.admission.version, self.drafting)
        self.reset()

    def release_weights(self) -> EngineWeights:
        return self.device.release_weights()

    def restore_weights(self, held: EngineWeights, version: int) -> None:
        """Takes the weights of `version` that an engine of another layout released; pages and tables are empty."""
        self.device.restore_weights(held)
        self.admission.version = version


class HostWeights:
    """Takes the weights of an engine off its devices while it has nothing to do, and brings back the bits that it had.

    Each process keeps the pieces of its own devices.

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
        self._engine.restore_weights(EngineWeights(params, owned=False), self._engine.version)

    def rest(self) -> None:
        """Frees weights and pages on the devices. The engine has no requests."""
        self._engine.admission.rest()
        drop(self._engine.release_weights().params)


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


def drop(tree: Any) -> None:
    """Frees the memory of device arrays at once, also while references to them are left."""
    for leaf in jax.tree.leaves(tree):
        leaf.delete()


def _analytic(model: decoder.ModelConfig, sizes: EngineSettings) -> costs.StepCost:
    """Returns the analytic cost table of this kind of device. A pass of the wide prompt program costs a step."""
    count = sum(leaf.size for leaf in jax.tree.leaves(decoder.abstract(model)))
    rows = {*sizes.row_sizes, sizes.prompt_rows} - {0}
    size = held_bytes(model, sizes.weights, sizes.dtype) / count
    return costs.analytic(jax.devices()[0].device_kind, count, size, sorted(rows))
