"""The row engine: the host's side of slots and pages (engine/host/row_host.py) over compiled programs and weights.

Invariant: the host decides when a token is computed, the programs which, from weights, text, seed and law alone. It
refuses what does not fit the model, and it never recompiles.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from jaxrl_post.engine import compiled
from jaxrl_post.engine import step_cost as costs
from jaxrl_post.engine.host.row_host import RowHost
from jaxrl_post.engine.host.swap_policy import Carry
from jaxrl_post.engine.host.wire import Entry, Sizes, Told
from jaxrl_post.engine.speculation.interface import Off
from jaxrl_post.engine.speculation.speculation import Drafting
from jaxrl_post.models import decoder
from jaxrl_post.parallel import mesh as meshes
from jaxrl_post.parallel import weight_sync
from jaxrl_post.types import Layout


class Held(NamedTuple):
    """Weights, and whether nobody but the engine uses them."""

    params: Any
    owned: bool


class RowEngine(RowHost):
    """protocols.Engine over the row program. Sizes are per replica; there are mesh data*fsdp replicas."""

    def __init__(
        self,
        model: decoder.ModelConfig,
        params: Any,
        mesh: jax.sharding.Mesh,
        *,
        slots: int,
        max_length: int,
        page_size: int,
        pages: int,
        row_sizes: Sequence[int],
        head_rows: int,
        steps_per_dispatch: int,
        refill_slots: int,
        restricted: bool = False,
        dtype: Any = np.float32,
        cost: costs.StepCost | None = None,
        decode: Callable[[np.ndarray], str] | None = None,
        version: int = 0,
        drafting: Drafting | None = None,
        carry: Carry | None = None,
    ):
        _check(model, mesh, max_length)
        sizes = Sizes.of(
            meshes.replicas(mesh),
            slots=slots,
            max_length=max_length,
            page_size=page_size,
            pages=pages,
            head_rows=head_rows,
            steps_per_dispatch=steps_per_dispatch,
            restricted=restricted,
        )
        super().__init__(
            sizes,
            row_sizes=row_sizes,
            refill_slots=refill_slots,
            cost=cost or _analytic(params, dtype, row_sizes),
            drafting=drafting or _no_drafts(sizes),
            vocab_size=model.vocab_size,
            decode=decode,
            version=version,
            carry=carry,
        )
        self._hold(model, params, mesh, dtype)

    def _hold(self, model: decoder.ModelConfig, params: Any, mesh: jax.sharding.Mesh, dtype: Any) -> None:
        """Places the weights and compiles every program."""
        self._layout = weight_sync.Layout(meshes.param_shardings(mesh, decoder.axes(model), "engine"), dtype)
        self.case = self._layout.case(params)
        self._params = self._layout.place(params)
        self._owned = self._params is not params
        drafter = self.drafting.drafter
        self._programs = compiled.Programs(model, mesh, self.sizes, self.row_sizes, dtype, drafter)
        self._programs.compile(self._params)
        self._state, self._tables = self._programs.blank()
        self.watched = self._programs.watched(drafter)

    def _put(self, entry: Entry, drafts: bool) -> None:
        self._state = self._programs.insert(self._state, entry, drafts)

    def _teach(self, pieces: Sequence[tuple], rates: np.ndarray) -> None:
        for piece in pieces:
            self._tables = self._programs.upload(self._tables, *piece)
        self._tables = self._programs.rated(self._tables, rates)

    def _dispatch(self, rows: int, drafts: bool, packed: np.ndarray, *, freed: int, clones: bool) -> Callable[[], Told]:
        self._state, told = self._programs.dispatch(
            rows,
            drafts,
            self._params,
            self._tables,
            self._state,
            packed,
            steps=self.sizes.steps,
            freed=freed,
            clones=clones,
        )
        return functools.partial(compiled.read, told)

    def _exchange(self, params: Any) -> None:
        self._layout.check(self._params, params)
        self._params = self._layout.replace(self._params, params, self._owned)
        self._owned = self._params is not params

    # ---- layouts

    @property
    def layout(self) -> Layout:
        return Layout(self.sizes.replicas, self._programs.mesh.shape[meshes.TENSOR])

    def relayout(self, layout: Layout) -> None:
        if layout != self.layout:
            raise ValueError(
                f"engine: {layout} was asked for, only {self.layout} was compiled; name others in engine.layouts"
            )

    def rehearse(self, params: Any) -> None:
        """A swap to these weights that is none: whatever a later swap runs is compiled then."""
        self._exchange(params)

    def lay_down(self) -> Held:
        """Gives up pages and tables and hands its weights out. Until `take_up` it holds nothing on a device."""
        drop((self._state, self._tables))
        held = Held(self._params, self._owned)
        self._params = self._state = self._tables = None
        return held

    def take_up(self, held: Held, version: int) -> None:
        """Weights that an engine of another layout laid down, used up where it owned them; pages and tables are empty."""
        assert self._params is None, "it holds weights already"
        self._params, self._owned = self._layout.bring(held.params, held.owned)
        self._version = version
        self._state, self._tables = self._programs.blank()


def drop(tree: Any) -> None:
    """Frees the memory of device arrays now, not when nobody names them any more."""
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
    return Drafting(Off(), replicas=sizes.replicas, slots=sizes.slots, past=lambda prompt_id: ())


def _analytic(params: Any, dtype: Any, row_sizes: Sequence[int]) -> costs.StepCost:
    """The analytic cost table of this kind of device."""
    count = sum(leaf.size for leaf in jax.tree.leaves(params))
    return costs.analytic(jax.devices()[0].device_kind, count, np.dtype(dtype).itemsize, row_sizes)
