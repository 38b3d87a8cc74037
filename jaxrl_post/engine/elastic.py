"""An engine that can lie on its devices in several ways: one row engine for each layout, compiled ahead.

RollPacker's elastic parallelism (arXiv 2509.21009, section 4): few replicas of many devices each where the KV pages of one
replica are short, many replicas where they are not; and its stream trainer (section 5.3): fewer replicas while a round drains,
whose devices the learner gets. Invariant: at any time one layout alone holds pages, tables and weights, and a move of the weights
needs at most one leaf more. What was pending goes on with its tokens forced, as after a checkpoint. Tokens drawn under another
layout have another numerics key: the same law, equal but for near ties; with fewer replicas of like size, the same programs.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Protocol

from jaxrl_post.engine.host.dispatch_log import Dispatch
from jaxrl_post.engine.row_engine import Held, RowEngine, drop
from jaxrl_post.types import Capacity, Group, Layout, Prompt, Request, Rollout, RolloutId


class Borrower(Protocol):
    """Gets the devices that a layout leaves free."""

    def borrow(self) -> None:
        """The engine has left them."""

    def give_back(self) -> None:
        """The engine is about to need them: whatever lies there must go."""


class Elastic:
    """protocols.Engine over several RowEngines.

    Args:
      make: builds, and may probe, the engine of a layout. The first one is where it begins. Each is called once, while no
        other layout holds anything.
      params: the learner's weights. Each layout rehearses a swap to them, so that a later swap compiles nothing.
      borrower: of the devices that the first layout has and another one has not; None: they rest.

    Raises:
      ValueError: a layout that the model or the devices do not allow.
    """

    def __init__(self, make: Mapping[Layout, Callable[[], RowEngine]], params: Any, borrower: Borrower | None = None):
        first, *others = make
        self.engines: dict[Layout, RowEngine] = {}
        for layout in (*others, first):
            self.engines[layout] = engine = make[layout]()
            assert engine.layout == layout, f"{layout} was built as {engine.layout}"
            engine.rehearse(params)
            if layout != first:
                held = engine.lay_down()
                drop(held.params if held.owned else ())
        self._engine, self._borrower = engine, borrower
        self._others: tuple[Layout, Held] | None = None  # the learner's own weights, as a larger layout used them
        self._prompts: dict[RolloutId, Prompt] = {}
        self._counts: Counter[str] = Counter()
        self.drafting = Drafts(self)

    @property
    def engine(self) -> RowEngine:
        """The one that holds pages and weights."""
        return self._engine

    @property
    def layout(self) -> Layout:
        return self._engine.layout

    @property
    def report(self) -> Callable[[Dispatch], object] | None:
        """Where set, it is shown every dispatch, in any layout."""
        return self._engine.report

    @report.setter
    def report(self, report: Callable[[Dispatch], object] | None) -> None:
        for engine in self.engines.values():
            engine.report = report

    @property
    def meanwhile(self) -> Callable[[], object] | None:
        """Where set, it is called while a dispatch is on its way, in any layout."""
        return self._engine.meanwhile

    @meanwhile.setter
    def meanwhile(self, meanwhile: Callable[[], object] | None) -> None:
        for engine in self.engines.values():
            engine.meanwhile = meanwhile

    # ---- what the loop sees

    @property
    def capacity(self) -> Capacity:
        return self._engine.capacity

    @property
    def clock(self) -> int:
        return self._engine.clock

    @property
    def version(self) -> int:
        return self._engine.version

    @property
    def pending(self) -> int:
        return self._engine.pending

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

    def swap(self, params: Any, version: int) -> None:
        self._engine.swap(params, version)
        self._others = None

    def relayout(self, layout: Layout) -> None:
        if layout == self.layout:
            return
        if layout not in self.engines:
            near = min(self.engines, key=lambda known: (abs(known.tensor - layout.tensor), known))
            raise ValueError(
                f"engine: {layout} was asked for, compiled are {', '.join(map(str, self.engines))}; the nearest "
                f"is {near}"
            )
        state = self._engine.state_dict()
        self._counts.update(num_relayouts=1, num_moved=len(state["lives"]))
        self._move(layout)
        self._load(state)

    def _move(self, layout: Layout) -> None:
        """Weights and version, to an engine that knows of no request. What the learner owns is not copied back where it was."""
        version, before, more = self.version, self.layout, layout.devices - self.layout.devices
        held, others = self._engine.lay_down(), self._others
        self._others = (before, held) if more < 0 and not held.owned else None
        if others and others[0] == layout:
            held = others[1]
        if self._borrower and more > 0:
            self._borrower.give_back()
        self._engine = self.engines[layout]
        self._engine.take_up(held, version)
        if self._borrower and more < 0:
            self._borrower.borrow()

    def _load(self, state: Mapping) -> None:
        """Requests, clocks and counters of the engine before."""
        here = {"row_sizes": self._engine.row_sizes, "cost": self._engine.cost.digest}
        prompts = {prompt.id: prompt for prompt in self._prompts.values()}
        replicas = moved([(live["id"], live["replica"]) for live in state["lives"]], self.layout.replicas)
        lives = [live | {"replica": replica} for live, replica in zip(state["lives"], replicas, strict=True)]
        self._engine.load_state_dict(state | here | {"lives": lives}, prompts)

    def state_dict(self) -> dict:
        return {"layout": list(self.layout), "moves": dict(self._counts), "engine": self._engine.state_dict()}

    def load_state_dict(self, state: Mapping, prompts: Mapping[str, Prompt]) -> None:
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
            id: prompts[id.prompt_id] for id in (RolloutId(*live["id"]) for live in state["engine"]["lives"])
        }

    def metrics(self) -> dict[str, float]:
        counts, self._counts = self._counts, Counter()
        return self._engine.metrics() | {
            "engine/num_relayouts": float(counts["num_relayouts"]),
            "engine/num_moved_rollouts": float(counts["num_moved"]),
            "engine/tensor": float(self.layout.tensor),
            "engine/replicas": float(self.layout.replicas),
        }


class Drafts:
    """What keeps scored groups for the engine that works just then; the others get them with its state."""

    def __init__(self, elastic: Elastic):
        self._elastic = elastic

    def record(self, group: Group) -> None:
        self._elastic.engine.drafting.record(group)

    def metrics(self) -> dict[str, float]:
        return self._elastic.engine.drafting.metrics()


def moved(lives: Sequence[tuple[Sequence, int]], replicas: int) -> list[int]:
    """New replicas, of so many, for rollouts (id, replica), in order. Samples of a prompt that shared a replica still do; each
    such group goes where the fewest rollouts are by then."""
    groups = Counter((RolloutId(*id).prompt_id, replica) for id, replica in lives)
    load, home = [0] * replicas, {}
    for group, size in groups.items():  # in order of first appearance
        home[group] = load.index(min(load))
        load[home[group]] += size
    return [home[RolloutId(*id).prompt_id, replica] for id, replica in lives]
