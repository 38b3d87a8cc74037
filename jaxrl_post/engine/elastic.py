"""An engine with several layouts on its devices: one compiled row engine for each layout, of which one is active.

Elastic parallelism (RollPacker, arXiv 2509.21009, section 4): few replicas of many devices where the KV pages of one
replica are short, else many replicas. Stream trainer (section 5.3): fewer replicas while a round drains; the learner
gets the free devices.

Invariant: one layout alone holds pages, tables and weights. Moving the weights needs at most one more leaf in memory.
Pending requests resume with their tokens forced, as after a checkpoint. Tokens sampled under another layout belong to
another numerics key: the sampling law is the same, and tokens differ only at near ties. Fewer replicas of one size run
the same programs.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Protocol

from jaxrl_post.engine.host.dispatch_log import Dispatch
from jaxrl_post.engine.host.turns import AroundEngine
from jaxrl_post.engine.row_engine import EngineWeights, RowEngine, drop
from jaxrl_post.ring.types import Group, Layout, Prompt, Request, Rollout, RolloutId


class Borrower(Protocol):
    """Uses the devices that the present layout leaves free."""

    def borrow(self) -> None:
        """Takes the devices: the engine has left them."""

    def give_back(self) -> None:
        """Frees everything on the devices: the engine is about to use them."""


class Elastic(AroundEngine):
    """A protocols.Engine over several RowEngines. The active one is inside.

    Args:
      make: functions that build, and may probe, the engine of a layout. The first layout is active at the start. Each
        function is called once, while no other layout holds anything.
      params: the learner's weights. Each layout makes a swap to them, so that later swaps compile nothing.
      borrower: gets devices of the first layout that another layout does not use; None: they stay idle.

    Attributes:
      report: called with every Dispatch of every layout, where set.
      meanwhile: called while a dispatch runs on the device, in every layout, where set.

    Raises:
      ValueError: the model or the devices do not allow a layout.
    """

    report: Callable[[Dispatch], object] | None = None
    meanwhile: Callable[[], object] | None = None

    def __init__(self, make: Mapping[Layout, Callable[[], RowEngine]], params: Any, borrower: Borrower | None = None):
        first, *others = make
        self.engines: dict[Layout, RowEngine] = {}
        for layout in (*others, first):
            self.engines[layout] = engine = make[layout]()
            assert engine.layout == layout, f"{layout} was built as {engine.layout}"
            engine.report, engine.meanwhile = self._reported, self._dispatched
            engine.warm_up_swap(params)
            if layout != first:
                held = engine.release_weights()
                drop(held.params if held.owned else ())
        self._engine, self._borrower = engine, None
        self._others: tuple[Layout, EngineWeights] | None = (
            None  # a larger layout, and the learner's weights as it used them
        )
        self._prompts: dict[RolloutId, Prompt] = {}
        self._counts: Counter[str] = Counter()
        self.drafting = ActiveDrafting(self)
        for one, other in itertools.permutations(self.engines, 2):  # so that later moves compile nothing
            for layout in (one, other, first):
                if layout != self.layout:
                    self._move(layout)
        self._borrower = borrower

    def _reported(self, dispatch: Dispatch) -> None:
        if self.report is not None:
            self.report(dispatch)

    def _dispatched(self) -> None:
        if self.meanwhile is not None:
            self.meanwhile()

    @property
    def engine(self) -> RowEngine:
        """Returns the active engine, which holds pages and weights."""
        return self._engine

    @property
    def layout(self) -> Layout:
        return self._engine.layout

    # ---- protocols.Engine

    def submit(self, requests: Sequence[Request]) -> None:
        self._engine.submit(requests)
        self._prompts.update((request.rollout_id, request.prompt) for request in requests)

    def park(self, ids: Iterable[RolloutId]) -> list[Rollout]:
        parked = self._engine.park(ids)
        self._forget(rollout.id for rollout in parked)
        return parked

    def step(self) -> list[Rollout]:
        finished = self._engine.step()
        self._forget(rollout.id for rollout in finished)
        return finished

    def _forget(self, ids: Iterable[RolloutId]) -> None:
        for id in ids:
            self._prompts.pop(id, None)

    def swap(self, params: Any, version: int, finite: Any = None) -> None:
        self._engine.swap(params, version, finite)
        self._others = None

    def relayout(self, layout: Layout) -> None:
        if layout == self.layout:
            return
        if layout not in self.engines:
            near = min(self.engines, key=lambda known: (abs(known.tensor - layout.tensor), known))
            raise ValueError(
                f"engine: {layout} was requested, compiled are {', '.join(map(str, self.engines))}; the nearest "
                f"is {near}"
            )
        state = self._engine.state_dict()
        self._counts.update(num_relayouts=1, num_moved=len(state["lives"]))
        self._move(layout)
        self._load(state)

    def _move(self, layout: Layout) -> None:
        """Moves weights and version to the engine of a layout, without requests.

        Weights that the learner owns are not copied back to a layout that used them before."""
        version, before, more = self.version, self.layout, layout.devices - self.layout.devices
        held, others = self._engine.release_weights(), self._others
        self._others = (before, held) if more < 0 and not held.owned else None
        if others and others[0] == layout:
            held = others[1]
        if self._borrower and more > 0:
            self._borrower.give_back()
        self._engine = self.engines[layout]
        self._engine.restore_weights(held, version)
        if self._borrower and more < 0:
            self._borrower.borrow()

    def _load(self, state: Mapping) -> None:
        """Gives requests, clocks and counters of the engine before to the active engine."""
        here = {"row_sizes": self._engine.row_sizes, "cost": self._engine.cost.digest}
        prompts = {prompt.id: prompt for prompt in self._prompts.values()}
        replicas = moved([(one["id"], one["replica"]) for one in state["lives"]], self.layout.replicas)
        lives = [one | {"replica": replica} for one, replica in zip(state["lives"], replicas, strict=True)]
        self._engine.load_state_dict(state | here | {"lives": lives}, prompts)

    def state_dict(self) -> dict:
        return {"layout": list(self.layout), "moves": dict(self._counts), "engine": self._engine.state_dict()}

    def load_state_dict(self, state: Mapping, prompts: Mapping[str, Prompt]) -> None:
        """Restores a saved state, in its layout.

        Raises:
          ValueError: the saved layout was not compiled.
        """
        layout = Layout(*state["layout"])
        if layout not in self.engines:
            raise ValueError(
                f"engine: the run was saved in {layout}, compiled are {', '.join(map(str, self.engines))}; name "
                "the former in engine.layouts"
            )
        if layout != self.layout:
            self._move(layout)
        self._counts = Counter(state["moves"])
        self._engine.load_state_dict(state["engine"], prompts)
        self._prompts = {
            id: prompts[id.prompt_id] for id in (RolloutId(*one["id"]) for one in state["engine"]["lives"])
        }

    def metrics(self) -> dict[str, float]:
        counts, self._counts = self._counts, Counter()
        return self._engine.metrics() | {
            "engine/num_relayouts": float(counts["num_relayouts"]),
            "engine/num_moved_rollouts": float(counts["num_moved"]),
            "engine/tensor": float(self.layout.tensor),
            "engine/replicas": float(self.layout.replicas),
        }


class ActiveDrafting:
    """Records scored groups in the active engine's drafter. Other engines get them with its state."""

    def __init__(self, elastic: Elastic):
        self._elastic = elastic

    def record(self, group: Group) -> None:
        self._elastic.engine.drafting.record(group)

    def metrics(self) -> dict[str, float]:
        return self._elastic.engine.drafting.metrics()


def moved(rollouts: Sequence[tuple[Sequence, int]], replicas: int) -> list[int]:
    """Returns the new replica of each rollout (id, replica), in order. `replicas` is the number of new replicas.

    Samples of a prompt that shared a replica still share one. Each such group goes to the replica with the fewest
    rollouts so far.
    """
    groups = Counter((RolloutId(*id).prompt_id, replica) for id, replica in rollouts)
    load, home = [0] * replicas, {}
    for group, size in groups.items():  # in order of first appearance
        home[group] = load.index(min(load))
        load[home[group]] += size
    return [home[RolloutId(*id).prompt_id, replica] for id, replica in rollouts]
