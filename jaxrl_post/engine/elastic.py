"""An engine that can lie on its devices in several ways: one row engine for each layout, compiled ahead.

RollPacker's elastic parallelism (arXiv 2509.21009, section 4): few replicas of many devices each where the KV pages of one
replica are short, many replicas where they are not. Invariant: at any time one layout alone holds pages, tables and weights,
and a move of the weights needs at most one leaf more. What was pending goes on with its tokens forced, as after a checkpoint.
Tokens drawn under another layout have another numerics key: the same law, equal but for near ties.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from jaxrl_post.engine.engine import RowEngine, drop
from jaxrl_post.slots.dispatches import Dispatch
from jaxrl_post.types import Capacity, Group, Layout, Prompt, Request, Rollout, RolloutId


class Elastic:
    """protocols.Engine over several RowEngines.

    Args:
      make: builds, and may probe, the engine of a layout. The first one is where it begins. Each is called once, while no
        other layout holds anything.
      params: the learner's weights. Each layout rehearses a swap to them, so that a later swap compiles nothing.

    Raises:
      ValueError: a layout that the model or the devices do not allow.
    """

    def __init__(self, make: Mapping[Layout, Callable[[], RowEngine]], params: Any):
        first, *others = make
        self.engines: dict[Layout, RowEngine] = {}
        for layout in (*others, first):
            self.engines[layout] = engine = make[layout]()
            assert engine.layout == layout, f"{layout} was built as {engine.layout}"
            engine.rehearse(params)
            if layout != first:
                held = engine.lay_down()
                drop(held.params if held.owned else ())
        self._engine = engine
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

    def cancel(self, ids: Iterable[RolloutId]) -> None:
        ids = tuple(ids)
        self._engine.cancel(ids)
        self._forget(ids)

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

    def relayout(self, layout: Layout) -> None:
        if layout == self.layout:
            return
        if layout not in self.engines:
            near = min(self.engines, key=lambda known: (abs(known.tensor - layout.tensor), known))
            raise ValueError(f"engine: {layout} was asked for, compiled are {', '.join(map(str, self.engines))}; the nearest "
                             f"is {near}")
        before, state = self.layout, self._engine.state_dict()
        self._counts.update(num_relayouts=1, num_moved=len(state["lives"]))
        self._move(layout)
        self._load(state, before)

    def _move(self, layout: Layout) -> None:
        """Weights and version, to an engine that knows of no request."""
        version, held = self.version, self._engine.lay_down()
        self._engine = self.engines[layout]
        self._engine.take_up(held, version)

    def _load(self, state: Mapping, before: Layout) -> None:
        """Requests, clocks and counters of the engine that lay so before."""
        here = {"row_sizes": self._engine.row_sizes, "cost": self._engine.cost.digest}
        prompts = {prompt.id: prompt for prompt in self._prompts.values()}
        replicas = moved([(live["id"], live["replica"]) for live in state["lives"]], before.replicas,
                         self.layout.replicas)
        lives = [live | {"replica": replica} for live, replica in zip(state["lives"], replicas, strict=True)]
        self._engine.load_state_dict(state | here | {"lives": lives}, prompts)

    def state_dict(self) -> dict:
        return {"layout": list(self.layout), "moves": dict(self._counts), "engine": self._engine.state_dict()}

    def load_state_dict(self, state: Mapping, prompts: Mapping[str, Prompt]) -> None:
        layout = Layout(*state["layout"])
        if layout not in self.engines:
            raise ValueError(f"engine: the run was saved in {layout}, compiled are {', '.join(map(str, self.engines))}; name "
                             "the former in engine.layouts")
        if layout != self.layout:
            self._move(layout)
        self._counts = Counter(state["moves"])
        self._engine.load_state_dict(state["engine"], prompts)
        self._prompts = {id: prompts[id.prompt_id] for id in (RolloutId(*live["id"]) for live in state["engine"]["lives"])}

    def metrics(self) -> dict[str, float]:
        counts, self._counts = self._counts, Counter()
        return self._engine.metrics() | {"engine/num_relayouts": float(counts["num_relayouts"]),
                                         "engine/num_moved_rollouts": float(counts["num_moved"]),
                                         "engine/tensor": float(self.layout.tensor)}


class Drafts:
    """What keeps scored groups for the engine that works just then; the others get them with its state."""

    def __init__(self, elastic: Elastic):
        self._elastic = elastic

    def record(self, group: Group) -> None:
        self._elastic.engine.drafting.record(group)

    def metrics(self) -> dict[str, float]:
        return self._elastic.engine.drafting.metrics()


def moved(lives: Sequence[tuple[Sequence, int]], before: int, after: int) -> list[int]:
    """The replicas, of `after`, of rollouts (id, replica of `before`), in order. A replica's become another's when there are
    fewer; when there are more, its prompts take turns among those that it became. Samples of a prompt that shared a replica
    still do."""
    seen: dict[int, dict[str, int]] = {}
    out = []
    for id, replica in lives:
        turns = seen.setdefault(replica, {})
        turn = turns.setdefault(RolloutId(*id).prompt_id, len(turns))
        first, end = replica * after // before, max((replica + 1) * after // before, replica * after // before + 1)
        out.append(first + turn % (end - first))
    return out
