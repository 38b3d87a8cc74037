"""The host side of a row engine: requests, slots, pages, row sizes and results, behind the Engine protocol.

Each `step` admits waiting sequences, maps pages for the expected growth, chooses a row size from the cost table,
dispatches and collects. A RowDevice computes the dispatch (host/device.py).

Invariant: the host decides when a token is computed, never which token. Its decisions follow from the requests and the
results of dispatches alone, so two devices with equal results are served alike. It refuses requests that can never fit.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from jaxrl_post.engine import step_cost as costs
from jaxrl_post.engine.host import dispatch_log, packing, sequence, wire
from jaxrl_post.engine.host.admission import Admission, Admitted
from jaxrl_post.engine.host.device import DispatchOrder, RowDevice
from jaxrl_post.engine.host.dispatch_log import Counters, Dispatch
from jaxrl_post.engine.host.replica import Copy, Replica
from jaxrl_post.engine.host.sequence import SequenceState
from jaxrl_post.engine.host.swap_policy import SwapPolicy
from jaxrl_post.engine.host.wire import DispatchResult, EngineSettings
from jaxrl_post.ring.types import PURPOSES, Capacity, Finish, Layout, Prompt, Request, Rollout, RolloutId


class RowHost:
    """A protocols.Engine over a RowDevice.

    Args:
      cost: seconds of a step by its rows.
      drafting: the host side of speculative decoding (engine/speculation/speculation.py).
      decode: tokens to text, for stop strings; None: refused.
      swap_policy: what becomes of running rollouts at a swap; None: they keep tokens and KV.

    Attributes:
      report: called with every Dispatch, where set.
      meanwhile: called while a dispatch runs on the device, where set.

    Raises:
      ValueError: the largest row size is below the slots, or the pages hold less than one rollout.
    """

    report: Callable[[Dispatch], object] | None = None
    meanwhile: Callable[[], object] | None = None

    def __init__(
        self,
        device: RowDevice,
        sizes: EngineSettings,
        *,
        cost: costs.StepCost,
        vocab_size: int,
        drafting: Any,
        decode: Callable[..., str] | None = None,
        version: int = 0,
        swap_policy: SwapPolicy | None = None,
    ):
        sequence.check_sizes(sizes)
        self.device, self.sizes, self.row_sizes = device, sizes, tuple(sorted(sizes.row_sizes))
        self.vocab_size, self.cost, self._decode = vocab_size, cost, decode
        self.swap_policy = swap_policy or SwapPolicy()
        self.admission = Admission(sizes, version, drafting)
        self.reset()

    def reset(self) -> None:
        """Resets clocks, counters and order. No request may have a slot."""
        self.admission.reset()
        self.sequences: dict[RolloutId, SequenceState] = {}
        self._purposes: Counter[str] = Counter()
        self._finished: list[tuple[SequenceState, Finish]] = []
        self._age = 0
        self._clock = dict.fromkeys(PURPOSES, 0)
        self._growth = 1.0
        self.counters = Counters()
        self.drafting.reset()
        self.swap_policy.reset()

    @property
    def drafting(self) -> Any:
        return self.admission.drafting

    # ---- protocols.Engine

    @property
    def capacity(self) -> Capacity:
        return self.admission.capacity

    @property
    def clock(self) -> int:
        return self._clock["train"]

    @property
    def version(self) -> int:
        return self.admission.version

    @property
    def pending(self) -> int:
        """Returns the number of requests in the engine; with any of evaluation, only those."""
        return self._purposes[self._purpose]

    @property
    def _purpose(self) -> str:
        """Returns the purpose that runs: evaluation while the engine has any, then questions to a judge."""
        return next((one for one in ("eval", "judge") if self._purposes[one]), "train")

    def submit(self, requests: Sequence[Request]) -> None:
        here = set(self.sequences)
        for request in requests:
            sequence.check_request(request, self.sizes, self.vocab_size, decodes=self._decode is not None)
            if request.rollout_id in here:
                raise ValueError(f"request {request.rollout_id} is already in the engine")
            here.add(request.rollout_id)
        self._queue([sequence.begin(request, self._age + i) for i, request in enumerate(requests)])
        self._age += len(requests)

    def _queue(self, sequences: Iterable[SequenceState]) -> None:
        """Adds sequences to the waiting list, or to the finished ones where their prefix ends them."""
        for one in sequences:
            self.sequences[one.request.rollout_id] = one
            self._purposes[one.request.purpose] += 1
            ending = one.ending()
            if ending is None:
                self.admission.waiting.append(one)
            else:
                self._finished.append((one, ending))

    def park(self, ids: Iterable[RolloutId]) -> list[Rollout]:
        gone = {name: self._pop(name) for name in ids if name in self.sequences}
        if not gone:
            return []
        for one in gone.values():
            if one.slot >= 0:
                self.admission.leave(one)
        self.admission.waiting = [one for one in self.admission.waiting if one.request.rollout_id not in gone]
        self._finished = [(one, how) for one, how in self._finished if one.request.rollout_id not in gone]
        parked = (one.rollout(Finish.PARKED, self._clock[one.request.purpose]) for one in gone.values())
        return sorted(parked, key=lambda rollout: rollout.id)

    def _pop(self, name: RolloutId) -> SequenceState:
        self._purposes[name.purpose] -= 1
        return self.sequences.pop(name)

    def swap(self, params: Any, version: int, finite: Any = None) -> None:
        """Running rollouts follow the swap policy."""
        if version <= self.version:
            raise ValueError(f"swap: version {version} must be greater than the current {self.version}")
        self.device.exchange(params, finite)
        self.admission.version = version
        for one, mode in self.swap_policy.modes(self.sequences.values()):
            if mode == "verify":
                one.unsettle()
            if mode != "keep" and one.slot >= 0:
                self.admission.requeue(one)
            elif one.slot >= 0:
                self.admission.replicas[one.request.replica].prompts.abandon(one.slot)

    def relayout(self, layout: Layout) -> None:
        self.device.relayout(layout)

    def state_dict(self) -> dict:
        self.admission.rest()
        self.drafting.rest()
        return {
            "age": self._age,
            "clock": dict(self._clock),
            "growth": self._growth,
            "counts": self.counters.state_dict(),
            "row_sizes": list(self.row_sizes),
            "cost": self.cost.digest,
            "lives": [sequence.to_state(one) for one in sorted(self.sequences.values(), key=lambda one: one.age)],
            "drafting": self.drafting.state_dict(),
            "carry": self.swap_policy.state_dict(),
            **({"products": self.sizes.products_key} if self.sizes.products_key != wire.LIBRARY else {}),
        }

    def load_state_dict(self, state: Mapping, prompts: Mapping[str, Prompt]) -> None:
        if state["cost"] != self.cost.digest:
            raise ValueError(
                f"engine: the run was saved under cost table {state['cost']} and would resume under "
                f"{self.cost.digest} ({self.cost.source}), which gives other row sizes; use the first"
            )
        products = state.get("products", wire.LIBRARY)
        if products != self.sizes.products_key:
            raise ValueError(
                f"engine: the run was saved under engine.products {products!r} and would resume under {self.sizes.products_key!r}, "
                "whose bits differ; use the option and the version of jaxrl_post that saved it"
            )
        self.reset()
        self._age, self._clock, self._growth = state["age"], dict(state["clock"]), state["growth"]
        self.counters.load_state_dict(state["counts"])
        self.row_sizes = tuple(state["row_sizes"])
        self.drafting.load_state_dict(state["drafting"])
        self.swap_policy.load_state_dict(state["carry"])
        self._queue(sequence.from_state(one, prompts) for one in state["lives"])

    def metrics(self) -> dict[str, float]:
        return self.counters.metrics() | self.swap_policy.metrics()

    def step(self) -> list[Rollout]:
        done, self._finished = self._finished, []
        results = [
            one.rollout(how, int(one.column("clocks")[-1]) if one.num_answered else self._clock[one.request.purpose])
            for one, how in done
        ]
        for rollout in results:
            self._pop(rollout.id)
        if self.sequences:
            purpose = self._purpose
            self._seat(purpose)
            if preempted := self.admission.num_preempted:
                self.counters.add("sched/preemptions", preempted)
            self.admission.num_preempted = 0
            results += self._run(purpose)
        return sorted(results, key=lambda rollout: (rollout.finish_clock, rollout.id))

    # ---- admission

    def _seat(self, purpose: str) -> None:
        """Gives slots and pages to waiting sequences. A wide program, where there is one, then computes their prompts."""
        while True:
            admitted = self._admit(purpose)
            self.admission.map_pages(purpose, int(self.sizes.steps_per_dispatch * self._growth) + 1)
            seated = [one for one, _ in admitted if one.slot >= 0 and one.num_computed < one.shared]
            if not (seated and self.sizes.prompt_rows):
                return
            self._prefill(purpose, seated)

    def _prefill(self, purpose: str, sequences: list[SequenceState]) -> None:
        """Computes the prompts of these sequences. A pass counts as an engine step."""
        rows, result = self.sizes.prompt_rows, packing.compute(self.device, self.sizes, sequences)
        for one in sequences:  # others may share what they have computed
            self.admission.replicas[one.request.replica].prompts.finish(one.slot)
        if self.report is not None:
            self.report(dispatch_log.of(purpose, self._clock[purpose], rows, False, result))
        self._clock[purpose] += result.steps
        self.swap_policy.used(self.counters.prefill(purpose, rows, result))

    def _admit(self, purpose: str) -> list[Admitted]:
        """Gives slots to waiting sequences and writes their texts to the device. Returns them."""
        admitted = self.admission.admit(purpose)
        for one, copy in admitted:
            if one.oldest < self.version:
                self.counters.add("sched/recomputed_older_versions", 1)
            if self.sizes.recurrent and copy.state != one.slot:
                self.counters.add("sched/copied_states", 1)
            if self.drafting.active:
                self.admission.open(one)
            if one.start_clock < 0:
                one.start_clock = self._clock[one.request.purpose]
        self._insert(admitted, self.drafting.active)
        return admitted

    def _insert(self, admitted: list[Admitted], drafts: bool, slots: Sequence[int] | None = None) -> None:
        """Writes texts and page copies to the device, into the sequences' own slots or into `slots`.

        `drafts`: the drafter learns the texts too."""
        places = slots or [one.slot for one, _ in admitted]
        for entry in packing.entries(self.sizes, self.device.watched if drafts else 0, admitted, places):
            self.device.put(entry, drafts)

    # ---- the dispatch

    def _run(self, purpose: str) -> list[Rollout]:
        """Runs one dispatch for sequences of this purpose. Returns the finished rollouts."""
        table = self.admission.table
        live = table.mask(purpose)
        if not live.any():
            return []
        packed = table.view(live)
        packed[..., wire.WATCH] = self.admission.watched(live)
        waiting = any(one.request.purpose == purpose for one in self.admission.waiting)
        size, drafts = self._size(live, packed, waiting)
        if drafts:
            self._show(self.admission.running(live), packed)
        clones = self._clone(self.admission.running(live), packed, size) if drafts and not waiting else []
        order = DispatchOrder(
            packed=packed,
            rows=size,
            drafts=drafts,
            clones=bool(clones),
            freed=self.sizes.refill_slots if waiting else sequence.NEVER,
            sequences=[replica.slots for replica in self.admission.replicas],
            purpose=purpose,
            clock=self._clock[purpose],
            version=self.version,
        )
        if self.sizes.recurrent:
            self.admission.drop_prompts()  # the slots that computed them have more rows now
        wait = self.device.dispatch(order)
        table.store()
        if self.meanwhile is not None:
            self.meanwhile()
        result = wait()
        for replica, pages in clones:
            replica.pages.release(pages)
        self._clock[purpose] += int(result.steps)
        if self.report is not None:
            self.report(dispatch_log.of(purpose, order.clock, size, drafts, result))
        self._count(purpose, size, result, drafts)
        return self._collect(live, result.out, order)

    def _size(self, live: np.ndarray, packed: np.ndarray, waiting: bool) -> tuple[int, bool]:
        """Returns the best row size for the busiest replica, by the step-cost table, and whether to draft.

        Each sequence has one row. Further rows are positions to prefill or to recompute, and candidates to verify. Drafts
        are worth nothing in a dispatch that ends once a prompt is computed and its other sequences join."""
        sizes, running = self.sizes, live.sum(axis=1)
        further = np.where(live, packed[..., wire.CANDIDATE_END] - packed[..., wire.NUM_COMPUTED] - 1, 0)
        backlog, most = further.sum(axis=1), int(running.max())
        free = 0 if waiting else sizes.slots - most
        unopened = int((live & ~self.admission.table.placed).sum()) / (sizes.slots * sizes.replicas)
        ends_soon = bool(packed[..., wire.WATCH].any())
        due = self.drafting.due(costs.tries_apart(self.cost)) and (self.drafting.forced or not ends_soon)
        return costs.best_size(
            self.cost,
            self.row_sizes,
            most,
            backlog[int(np.argmax(running + backlog))] / sizes.steps_per_dispatch,
            lambda rows: 0.0 if ends_soon else self.drafting.worth(rows, most, free),
            must_draft=bool(due),
            opening=self.cost.opening * unopened / (costs.LASTING * sizes.steps_per_dispatch),
        )

    def _show(self, sequences: list[SequenceState], packed: np.ndarray) -> None:
        """Prepares the drafter for a dispatch that drafts.

        Its tables get new groups and rates. Its live table learns the tokens of dispatches that did not draft."""
        unseen = [one for one in sequences if one.place is None or one.seen < one.num_tokens]
        weights = self.drafting.weights({one.request.rollout_id: one.num_answered for one in sequences})
        for one in sequences:
            if one.place is None:
                self.admission.open(one)
            packing.describe_drafts(packed, one, weights[one.request.rollout_id])
        self.device.teach(self.drafting.uploads(), self.drafting.estimates.rates())
        none = self.sizes.pages
        self._insert([(one, Copy(none, none, one.slot)) for one in unseen], True)

    def _clone(self, sequences: list[SequenceState], packed: np.ndarray, size: int) -> list[tuple[Replica, list[int]]]:
        """Gives free slots to clones of sequences that only decode, youngest first, while rows and pages last.

        A clone shares the full pages and has copies of the pages still written to.

        Returns: the replicas and pages to release after the dispatch."""
        held, copies = [], []
        for d, replica in enumerate(self.admission.replicas):
            mine = [one for one in sequences if one.request.replica == d]
            for one, slot, shared, own in packing.clones(replica, mine, packed[d], size, self.drafting.clones_of):
                copies.append(((one, Copy(one.pages[shared], own[0], one.slot)), slot))
                held.append((replica, own))
        self._insert([copy for copy, _ in copies], True, [slot for _, slot in copies])
        return held

    def _collect(self, live: np.ndarray, out: np.ndarray, order: DispatchOrder) -> list[Rollout]:
        """Adds settled tokens to all sequences of a dispatch. Returns the rollouts of those that have finished."""
        table, replicas = self.admission.table, self.admission.replicas
        found = table.settle(live, out, order.clock, self.version, order.drafts)
        for d, replica in enumerate(replicas):
            for slot in replica.prompts.leaders():
                if live[d, slot] and self.sizes.recurrent and table.passed(d, slot):
                    replica.prompts.abandon(slot)  # no state stands behind the prompt any more
                elif live[d, slot] and table.computed(d, slot):
                    replica.prompts.finish(slot)
        rollouts = []
        for d, slot, before in found:
            one = replicas[d].slots[slot]
            assert one is not None
            rollout = self._end(one, out[d, slot], before, order)
            if rollout is not None:
                rollouts.append(rollout)
        return rollouts

    def _end(self, one: SequenceState, out: np.ndarray, before: int, order: DispatchOrder) -> Rollout | None:
        """Returns the rollout of a sequence where it has finished.

        Candidates are compared with the settled tokens here. `out`: the slot's row of the result. `before`: tokens before
        the dispatch."""
        if one.candidates:
            settled = packing.settled(out, before, order.clock, self.sizes.record, self.sizes.route_words)
            self.swap_policy.record_outcome(one.candidates, settled.tokens)
            one.extend(settled, self.version)
            one.seen = one.num_tokens if order.drafts else one.seen
        ending = one.ending()
        length = one.stopped_at(self._decode, before - one.prompt_length) if self._decode else None
        if length is not None:
            self.counters.add("rows/stop_string_overrun", one.cut(length))
            ending = one.ending(stopped=True)
        if ending is None:
            return None
        self.admission.leave(one)
        self._pop(one.request.rollout_id)
        return one.rollout(ending, int(one.column("clocks")[-1]))

    # ---- counters

    def _count(self, purpose: str, size: int, result: DispatchResult, drafts: bool) -> None:
        """Counts the rows of a dispatch, and records its cost and its accepted drafts."""
        total, steps = dict(zip(wire.USES, result.uses.sum(axis=0).tolist())), int(result.steps)
        self.swap_policy.used(sum(total.values()) - total["idle"])
        won = int(result.won.sum())
        if drafts:
            self.drafting.ran(result.counts.sum(axis=0), result.offers.sum(axis=0), total, won)
            self.counters.add("spec/drafting_steps", steps)
        else:
            self.drafting.quiet(steps)
        self._growth = self.counters.dispatch(purpose, size, steps, total, won)
