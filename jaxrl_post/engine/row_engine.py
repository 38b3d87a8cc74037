"""The row engine: the host side (engine/host/row_host.py) over compiled programs and weights on a mesh.

Invariant: the host decides when a token is computed. The programs decide which token, from weights, text, seed and
sampling law alone. The engine refuses sizes that do not fit the model, and it never recompiles.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import numpy as np

from jaxrl_post.engine import compiled, merged_weights
from jaxrl_post.engine import step_cost as costs
from jaxrl_post.engine.host import sequence
from jaxrl_post.engine.host.admission import Admission
from jaxrl_post.engine.host.device import DispatchOrder
from jaxrl_post.engine.host.row_host import HostSettings, RowHost
from jaxrl_post.engine.host.swap_policy import SwapPolicy
from jaxrl_post.engine.host.wire import DispatchResult, Entry, Sizes
from jaxrl_post.engine.speculation.interface import Drafter, Off
from jaxrl_post.engine.speculation.speculation import Drafting
from jaxrl_post.models import decoder
from jaxrl_post.parallel import mesh as meshes
from jaxrl_post.types import Layout


class Held(NamedTuple):
    """Weights, and whether the engine alone uses them."""

    params: Any
    owned: bool


@dataclass(frozen=True, kw_only=True)
class EngineSettings:
    """What a row engine is compiled for; all sizes are per replica.

    `max_length`: positions of a slot. `pages`: pages of `page_size` positions. `row_sizes`: rows of a step that are
    compiled. `head_rows`: rows that can sample. `refill_slots`: finished slots that end a dispatch while requests wait.
    `restricted`: whether requests may have top-k and top-p. `dtype`: of activations and KV cache. `prompt_rows`: rows
    of the wide program that computes prompts; 0: the row program computes them. `scoring`: a request's prefix is not
    verified but scored: all of its tokens stay, with the log-probs of these weights."""

    slots: int
    max_length: int
    page_size: int
    pages: int
    row_sizes: Sequence[int]
    head_rows: int
    steps_per_dispatch: int
    refill_slots: int
    restricted: bool = False
    dtype: Any = np.float32
    prompt_rows: int = 0
    scoring: bool = False

    def sizes(self, replicas: int) -> Sizes:
        """Returns the sizes of the device programs."""
        return Sizes.of(
            replicas,
            slots=self.slots,
            max_length=self.max_length,
            page_size=self.page_size,
            pages=self.pages,
            head_rows=self.head_rows,
            steps_per_dispatch=self.steps_per_dispatch,
            restricted=self.restricted,
            prompt_rows=self.prompt_rows,
            scoring=self.scoring,
        )


class MeshDevice:
    """A RowDevice of compiled programs on a mesh. Holds weights, KV cache, texts and the drafter's tables.

    `layout`: makes what brings the weights; see merged_weights.layout.
    """

    def __init__(
        self,
        model: decoder.ModelConfig,
        params: Any,
        mesh: jax.sharding.Mesh,
        sizes: Sizes,
        settings: EngineSettings,
        drafter: Drafter,
        layout: Callable[..., Any] = merged_weights.layout,
    ):
        self._steps = sizes.steps
        self.layout = Layout(sizes.replicas, mesh.shape[meshes.TENSOR])
        self._sync = layout(model, params, mesh, settings.dtype)
        self.case = self._sync.case(params)  # how weights reach the engine
        self.links = self._sync.links(params)  # bytes of a swap, by link
        self.params = self._sync.place(params)
        self.owned = self.params is not params
        self.programs = compiled.Programs(
            model, mesh, sizes, tuple(sorted(settings.row_sizes)), settings.dtype, drafter
        )
        self.programs.compile(self.params)
        self.state, self.tables = self.programs.blank()
        self.watched = self.programs.watched(drafter)

    def put(self, entry: Entry, drafts: bool) -> None:
        """Writes texts into slots and copies pages; see RowDevice."""
        self.state = self.programs.insert(self.state, entry, drafts)

    def teach(self, pieces: Sequence[tuple[int, int, tuple[np.ndarray, ...]]], rates: np.ndarray) -> None:
        """Writes pieces and rates into the drafter's tables; see RowDevice."""
        for piece in pieces:
            self.tables = self.programs.upload(self.tables, *piece)
        self.tables = self.programs.rated(self.tables, rates)

    def dispatch(self, order: DispatchOrder) -> Callable[[], DispatchResult]:
        """Starts a dispatch; see RowDevice."""
        self.state, result = self.programs.dispatch(
            order.rows,
            order.drafts,
            self.params,
            self.tables,
            self.state,
            order.packed,
            steps=self._steps,
            freed=order.freed,
            clones=order.clones,
        )
        return functools.partial(compiled.read, result)

    def prefill(self, tiles: np.ndarray) -> None:
        """Starts a pass of the wide prompt program; see RowDevice."""
        self.state = self.programs.prefill(self.params, self.state, tiles)

    def exchange(self, params: Any) -> None:
        """Replaces the weights; see RowDevice."""
        self._sync.check(self.params, params)
        if self.state is None:  # asleep
            self.params = self._sync.place(params)
            self.state, self.tables = self.programs.blank()
        else:
            self.params = self._sync.replace(self.params, params, self.owned)
        self.owned = self.params is not params

    def relayout(self, layout: Layout) -> None:
        """Accepts the compiled layout; see RowDevice."""
        if layout != self.layout:
            raise ValueError(
                f"engine: {layout} was requested, only {self.layout} was compiled; name others in engine.layouts"
            )

    def sleep(self) -> None:
        """Frees pages, tables and the engine's own weights until the next `exchange`. Their shapes are kept."""
        if self.state is None:
            return
        held = self.lay_down()
        self.params = jax.eval_shape(lambda: held.params)
        self._sync.free(*held)

    def lay_down(self) -> Held:
        """Frees pages and tables and returns the weights. Nothing is left on a device until `take_up`."""
        drop((self.state, self.tables))
        held = Held(self.params, self.owned)
        self.params = self.state = self.tables = None
        return held

    def take_up(self, held: Held) -> None:
        """Takes weights that a device of another layout laid down, and allocates empty pages and tables.

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
      ValueError: the mesh does not divide the model, or the settings do not fit the model or each other.
    """

    device: MeshDevice

    def __init__(
        self,
        model: decoder.ModelConfig,
        params: Any,
        mesh: jax.sharding.Mesh,
        settings: EngineSettings,
        *,
        cost: costs.StepCost | None = None,
        decode: Callable[..., str] | None = None,
        version: int = 0,
        drafting: Drafting | None = None,
        swap_policy: SwapPolicy | None = None,
        device: Callable[..., MeshDevice] = MeshDevice,
    ):
        _check(model, mesh, settings.max_length)
        sizes = settings.sizes(meshes.replicas(mesh))
        sequence.check_sizes(sizes, settings.row_sizes)  # before anything is compiled
        drafting = drafting or _no_drafts(sizes)
        host = HostSettings(
            row_sizes=settings.row_sizes,
            refill_slots=settings.refill_slots,
            cost=cost or _analytic(model, settings),
            vocab_size=model.vocab_size,
            decode=decode,
        )
        made = device(model, params, mesh, sizes, settings, drafting.drafter)
        super().__init__(made, sizes, host, drafting=drafting, version=version, swap_policy=swap_policy)

    @property
    def layout(self) -> Layout:
        """Returns the compiled layout."""
        return self.device.layout

    def rehearse(self, params: Any) -> None:
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

    def lay_down(self) -> Held:
        """Frees pages and tables and returns the weights. Nothing is left on a device until `take_up`."""
        return self.device.lay_down()

    def take_up(self, held: Held, version: int) -> None:
        """Takes the weights of `version` that an engine of another layout laid down; pages and tables are empty."""
        self.device.take_up(held)
        self.admission.version = version


def drop(tree: Any) -> None:
    """Frees the memory of device arrays at once, also while references to them are left."""
    for leaf in jax.tree.leaves(tree):
        leaf.delete()


def _check(model: decoder.ModelConfig, mesh: jax.sharding.Mesh, max_length: int) -> None:
    """Refuses a mesh that does not divide the model, and positions beyond the model's."""
    heads = {"heads": model.heads, "kv_heads": model.kv_heads}
    meshes.check_divisible(mesh, decoder.axes(model), decoder.abstract(model), "engine", heads)
    if max_length > model.max_length:
        raise ValueError(
            f"engine.max_length={max_length} is beyond the model's {model.max_length} positions; the "
            f"nearest valid value is {model.max_length}"
        )


def _no_drafts(sizes: Sizes) -> Drafting:
    """Returns the host side of a drafter that never drafts."""
    return Drafting(Off(), replicas=sizes.replicas, slots=sizes.slots, past=lambda prompt_id: ())


def _analytic(model: decoder.ModelConfig, settings: EngineSettings) -> costs.StepCost:
    """Returns the analytic cost table of this kind of device. A pass of the wide prompt program costs a step."""
    count = sum(leaf.size for leaf in jax.tree.leaves(decoder.abstract(model)))
    rows = {*settings.row_sizes, settings.prompt_rows} - {0}
    return costs.analytic(jax.devices()[0].device_kind, count, np.dtype(settings.dtype).itemsize, sorted(rows))
