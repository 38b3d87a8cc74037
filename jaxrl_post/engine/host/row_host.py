"""The host's side of a row engine: requests, slots, pages, row sizes and results, behind the Engine protocol.

Per `step`: admit what waits (a prompt's first answer computes its pages, the others start from them), map pages for the
expected growth (parking the youngest if it must), choose a row size from the cost table, dispatch, and collect. What a
dispatch computes is the device's, of which there are several: compiled programs (engine/row_engine.py), numpy (sim/twin.py).

Invariant: all of that decides when a token is computed, never which; and it follows from the requests and from what
dispatches told, so two devices that tell the same are served the same. It refuses what can never fit.
"""

from __future__ import annotations

import abc
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from jaxrl_post.engine import step_cost as costs
from jaxrl_post.engine.host import dispatch_log, packing, row_sizing, sequence, wire
from jaxrl_post.engine.host.counters import Counters
from jaxrl_post.engine.host.dispatch_log import Dispatch
from jaxrl_post.engine.host.pages import PromptPages
from jaxrl_post.engine.host.replica import Replica
from jaxrl_post.engine.host.sequence import Live, begin, revived, written
from jaxrl_post.engine.host.swap_policy import Carry
from jaxrl_post.engine.host.wire import Entry, Sizes, Told
from jaxrl_post.types import Capacity, Finish, Prompt, Request, Rollout, RolloutId

NEVER = 1 << 30


class RowHost(abc.ABC):
    """protocols.Engine but for the device, which a subclass is. Sizes are per replica. `drafting`: see
    engine/speculation/speculation.py; `watched`: positions of a slot of which the likeliest token is kept. `report`,
    where set, is shown every dispatch; `meanwhile` is called while one is on its way."""

    watched = 0
    report: Callable[[Dispatch], object] | None = None
    meanwhile: Callable[[], object] | None = None

    def __init__(
        self,
        sizes: Sizes,
        *,
        row_sizes: Sequence[int],
        refill_slots: int,
        cost: costs.StepCost,
        drafting: Any,
        vocab_size: int,
        decode: Callable[[np.ndarray], str] | None = None,
        version: int = 0,
        carry: Carry | None = None,
    ):
        """
        Args:
          carry: what becomes of answers at a swap; None: they keep what they have.

        Raises:
          ValueError: row sizes below the slots, or pages for less than one rollout.
        """
        sequence.check_sizes(sizes, row_sizes)
        self.sizes, self.vocab_size, self.cost, self.drafting = sizes, vocab_size, cost, drafting
        self.row_sizes = tuple(sorted(row_sizes))
        self._decode, self._refill, self._version = decode, refill_slots, version
        self._carry = carry or Carry()
        self._replicas = [Replica(sizes.slots, sizes.pages, sizes.page) for _ in range(sizes.replicas)]
        self.reset()

    # ---- the device

    @abc.abstractmethod
    def _put(self, entry: Entry, drafts: bool) -> None:
        """Puts texts into slots and copies pages; `drafts`: shows them to the drafter too."""

    @abc.abstractmethod
    def _teach(self, pieces: Sequence[tuple], rates: np.ndarray) -> None:
        """Shows a drafter new pieces of its tables and the rates of its classes."""

    @abc.abstractmethod
    def _dispatch(self, rows: int, drafts: bool, packed: np.ndarray, *, freed: int, clones: bool) -> Callable[[], Told]:
        """Begins up to `sizes.steps` steps of `rows` rows, and gives what waits for them; they end once `freed` slots of a
        replica finished, a watched prompt is ready, nothing is left to do, or a slot has no room."""

    @abc.abstractmethod
    def _exchange(self, params: Any) -> None:
        """New weights. ValueError, and the old ones stay, when they do not fit."""

    def reset(self) -> None:
        """Clocks, counters and order start again; nothing may be pending."""
        assert not any(live for r in self._replicas for live in r.slots), "reset with requests in slots"
        for replica in self._replicas:
            replica.prompts.keep_only(set())
        self._here: dict[RolloutId, Live] = {}
        self._waiting: list[Live] = []
        self._finished: list[tuple[Live, Finish]] = []
        self._age = 0
        self._clock = {"train": 0, "eval": 0}
        self._growth = 1.0
        self.counters = Counters()
        self.drafting.reset()
        self._carry.reset()

    # ---- what the loop sees

    @property
    def capacity(self) -> Capacity:
        waiting = [sum(live.request.replica == d for live in self._waiting) for d in range(len(self._replicas))]
        return Capacity(
            slots=tuple(max(r.free - w, 0) for r, w in zip(self._replicas, waiting)),
            pages=tuple(r.pages.free for r in self._replicas),
        )

    @property
    def clock(self) -> int:
        return self._clock["train"]

    @property
    def version(self) -> int:
        return self._version

    @property
    def pending(self) -> int:
        purpose = self._purpose
        return sum(live.request.purpose == purpose for live in self._here.values())

    @property
    def _purpose(self) -> str:
        return "eval" if any(live.request.purpose == "eval" for live in self._here.values()) else "train"

    def submit(self, requests: Sequence[Request]) -> None:
        here = set(self._here)
        for request in requests:
            sequence.check_request(request, self.sizes, self.vocab_size, decodes=self._decode is not None)
            if request.rollout_id in here:
                raise ValueError(f"request {request.rollout_id} is already in the engine")
            here.add(request.rollout_id)
        self._queue([begin(request, self._age + i) for i, request in enumerate(requests)])
        self._age += len(requests)

    def _queue(self, lives: Iterable[Live]) -> None:
        for live in lives:
            self._here[live.request.rollout_id] = live
            ending = live.ending()
            if ending is None:
                self._waiting.append(live)
            else:
                self._finished.append((live, ending))

    def park(self, ids: Iterable[RolloutId]) -> list[Rollout]:
        lives = self._take_out(ids)
        return sorted(
            (live.rollout(Finish.PARKED, self._clock[live.request.purpose]) for live in lives),
            key=lambda rollout: rollout.id,
        )

    def _take_out(self, ids: Iterable[RolloutId]) -> list[Live]:
        out = [self._here.pop(name) for name in ids if name in self._here]
        for live in out:
            if live.slot >= 0:
                self._leave(live)
        if out:
            self._waiting = [live for live in self._waiting if live.request.rollout_id in self._here]
            self._finished = [(live, how) for live, how in self._finished if live.request.rollout_id in self._here]
        return out

    def swap(self, params: Any, version: int) -> None:
        if version <= self._version:
            raise ValueError(f"swap: version {version} must be greater than the current {self._version}")
        self._exchange(params)
        self._version = version
        for live, mode in self._carry.modes(self._here.values()):
            if mode == "verify":
                live.doubt()
            if mode != "keep" and live.slot >= 0:
                self._leave(live)
                self._waiting.append(live)
            elif live.slot >= 0:
                self._replicas[live.request.replica].prompts.abandon(live.slot)

    def state_dict(self) -> dict:
        for replica in self._replicas:
            for live in replica.running:
                self._leave(live)
                self._waiting.append(live)
            replica.prompts.keep_only(set())
        self.drafting.rest()
        lives = sorted(self._here.values(), key=lambda live: live.age)
        return {
            "age": self._age,
            "clock": dict(self._clock),
            "growth": self._growth,
            "counts": self.counters.state_dict(),
            "row_sizes": list(self.row_sizes),
            "cost": self.cost.digest,
            "lives": [written(live) for live in lives],
            "drafting": self.drafting.state_dict(),
            "carry": self._carry.state_dict(),
        }

    def load_state_dict(self, state: Mapping, prompts: Mapping[str, Prompt]) -> None:
        if state["cost"] != self.cost.digest:
            raise ValueError(
                f"engine: the run was saved under cost table {state['cost']} and would go on under "
                f"{self.cost.digest} ({self.cost.source}), which gives other row sizes; use the first"
            )
        self.reset()
        self._age, self._clock, self._growth = state["age"], dict(state["clock"]), state["growth"]
        self.counters.load_state_dict(state["counts"])
        self.row_sizes = tuple(state["row_sizes"])
        self.drafting.load_state_dict(state["drafting"])
        self._carry.load_state_dict(state["carry"])
        self._queue(revived(live, prompts) for live in state["lives"])

    def metrics(self) -> dict[str, float]:
        return self.counters.metrics() | self._carry.metrics()

    def step(self) -> list[Rollout]:
        done, self._finished = self._finished, []
        results = [
            live.rollout(how, live.clocks[-1] if live.clocks else self._clock[live.request.purpose])
            for live, how in done
        ]
        for rollout in results:
            del self._here[rollout.id]
        if self._here:
            purpose = self._purpose
            self._admit(purpose)
            self._map(purpose)
            results += self._run(purpose)
        return sorted(results, key=lambda rollout: (rollout.finish_clock, rollout.id))

    # ---- admission

    def _admit(self, purpose: str) -> None:
        self._waiting.sort(key=lambda live: live.age)
        admitted: list[tuple[Live, int, int]] = []
        for index, replica in enumerate(self._replicas):
            mine = [w for w in self._waiting if w.request.replica == index and w.request.purpose == purpose]
            replica.prompts.keep_only({self._key(live) for live in mine})
            if mine and not replica.free:
                self._evict(replica, purpose)
            for live in mine:
                if not replica.free:
                    break
                entry = replica.prompts.entries.get(self._key(live))
                if entry is not None and not entry.ready:
                    continue
                copied = self._seat(replica, live, entry)
                while copied is None and self._evict(replica, purpose):
                    copied = self._seat(replica, live, replica.prompts.entries.get(self._key(live)))
                if copied is None:
                    break
                admitted.append((live, *copied))
        seated = {id(live) for live, _, _ in admitted}
        self._waiting = [live for live in self._waiting if id(live) not in seated]
        self._insert(admitted, self.drafting.active)

    def _evict(self, replica: Replica, purpose: str) -> bool:
        """While nothing of this purpose runs, makes room: parks the youngest of another, then drops shared prompts."""
        if any(live.request.purpose == purpose for live in replica.running):
            return False
        if replica.running:
            self._preempt(replica.running[-1])
            return True
        held = bool(replica.prompts.entries)
        replica.prompts.keep_only(set())
        return held

    def _key(self, live: Live) -> tuple[str, str, int]:
        """Whose prompt pages it can share: never those of another version, nor of a purpose that stands still."""
        return live.request.purpose, live.request.prompt.id, self._version

    def _seat(self, replica: Replica, live: Live, entry: PromptPages | None) -> tuple[int, int] | None:
        """A slot and pages: (page to copy from, page to copy to), out of range for none. None: too few pages."""
        copied = replica.seat(live, entry, self._key(live))
        if copied is None:
            return None
        if any(v != self._version for v in live.versions):
            self.counters.add("sched/recomputed_older_versions", 1)
        if self.drafting.active:
            self._open(live)
        if live.start_clock < 0:
            live.start_clock = self._clock[live.request.purpose]
        return copied

    def _insert(self, admitted: list[tuple[Live, int, int]], drafts: bool, slots: Sequence[int] | None = None) -> None:
        """Puts the texts of admitted requests on the device, with (page to copy from, page to copy to) of each, into their
        own slots or into `slots`, and shows them to the drafter if they are to draft."""
        places = slots or [live.slot for live, _, _ in admitted]
        for entry in packing.entries(self.sizes, self.watched if drafts else 0, admitted, places):
            self._put(entry, drafts)

    # ---- pages

    def _map(self, purpose: str) -> None:
        """Maps pages for the expected growth, oldest first."""
        growth = int(self.sizes.steps * self._growth) + 1
        for replica in self._replicas:
            for live in replica.running:
                if live.slot >= 0 and live.request.purpose == purpose:
                    most = min(live.known + growth, live.limit - 1)
                    replica.grow(live, most, purpose, self._version, self._preempt)

    def _preempt(self, live: Live) -> None:
        """Takes a rollout out of its slot. It resumes later with its tokens forced and its candidates kept."""
        self.counters.add("sched/preemptions", 1)
        self._leave(live)
        self._waiting.append(live)

    def _leave(self, live: Live) -> None:
        if live.place is not None:
            self.drafting.leave(live.request.replica, live.request.prompt, live.place)
        self._replicas[live.request.replica].leave(live)
        live.place = None

    # ---- the dispatch

    def _run(self, purpose: str) -> list[Rollout]:
        packed, lives = self._pack(purpose)
        if not lives:
            return []
        waiting = any(w.request.purpose == purpose for w in self._waiting)
        size, drafts = self._size(lives, waiting, ends_soon=bool(packed[..., wire.WATCH].any()))
        if drafts:
            self._show(lives, packed)
        clones = self._clone(lives, packed, size) if drafts and not waiting else []
        wait = self._dispatch(size, drafts, packed, freed=self._refill if waiting else NEVER, clones=bool(clones))
        if self.meanwhile is not None:
            self.meanwhile()
        told = wait()
        for replica, pages in clones:
            replica.pages.release(pages)
        clock, steps = self._clock[purpose], int(told.steps)
        self._clock[purpose] += steps
        if self.report is not None:
            self.report(dispatch_log.of(purpose, clock, size, drafts, told))
        self._count(purpose, size, steps, told, drafts)
        settled = packing.settled(told.out, packed, clock)
        return [
            rollout
            for live in lives
            for rollout in self._collect(live, settled[live.request.replica][live.slot], drafts)
        ]

    def _clone(self, lives: list[Live], packed: np.ndarray, size: int) -> list[tuple[Replica, list[int]]]:
        """Gives free slots to answers that only decode and have no candidates, as long as there are rows and pages: the
        youngest, which have most before them, first. A clone shares the pages that are full and has its own of those still
        written to; what it holds, for the time of one dispatch."""
        held, copies = [], []
        for d, replica in enumerate(self._replicas):
            mine = [live for live in lives if live.request.replica == d]
            for live, slot, shared, own in packing.clones(replica, mine, packed[d], size, self.drafting.clones_of):
                copies.append(((live, live.pages[shared], own[0]), slot))
                held.append((replica, own))
        self._insert([copy for copy, _ in copies], True, [slot for _, slot in copies])
        return held

    def _show(self, lives: list[Live], packed: np.ndarray) -> None:
        """Before `lives` draft: the tables learn what was recorded and what drafts were worth, the live table the tokens that
        came without drafts."""
        unseen = [live for live in lives if live.place is None or live.seen < live.known]
        weights = self.drafting.weights({live.request.rollout_id: len(live.tokens) for live in lives})
        for live in lives:
            if live.place is None:
                self._open(live)
            packing.describe_drafts(packed, live, weights[live.request.rollout_id])
        self._teach(self.drafting.uploads(), self.drafting.estimates.rates())
        none = self.sizes.pages
        self._insert([(live, none, none) for live in unseen], True)

    def _open(self, live: Live) -> None:
        """From now on it has a place in the drafter's tables."""
        live.place, fresh = self.drafting.open(live.request.replica, live.request.prompt)
        live.seen = 0 if fresh else live.prompt_length

    def _pack(self, purpose: str) -> tuple[np.ndarray, list[Live]]:
        """The packed matrix, and whom it lets run: those of this purpose that sit in slots."""
        packed = packing.blank(self.sizes)
        waiting = {(w.request.replica, self._key(w)) for w in self._waiting}
        lives = []
        for d, replica in enumerate(self._replicas):
            packed[d, :, wire.ORDER] = packing.order(replica)
            free = replica.free > 0
            for live in replica.running:
                if live.request.purpose == purpose:
                    watched = free and (d, self._key(live)) in waiting
                    packing.describe(live, packed[d, live.slot], replica, watched)
                    lives.append(live)
        return packed, lives

    def _size(self, lives: list[Live], waiting: bool, ends_soon: bool) -> tuple[int, bool]:
        """Chooses a kept row size for the busiest replica, and whether to draft."""
        running, backlog = row_sizing.load(lives, len(self._replicas))
        due = self.drafting.due(costs.tries_apart(self.cost)) and (self.drafting.forced or not ends_soon)
        unopened = sum(live.place is None for live in lives)
        return row_sizing.choose(
            self.cost,
            self.row_sizes,
            self.sizes,
            running,
            backlog,
            self.drafting.worth,
            due,
            unopened,
            waiting,
            ends_soon,
        )

    def _collect(self, live: Live, settled: packing.Settled, drafts: bool) -> list[Rollout]:
        replica, checked = self._replicas[live.request.replica], len(live.tokens)
        self._carry.told(live.guesses, settled.tokens)
        live.extend(settled, self._version)
        live.filled = settled.filled
        live.seen = live.known if drafts else live.seen
        if live.filled >= live.shared:
            replica.prompts.finish(live.slot)
        ending = live.ending()
        length = live.stopped_at(self._decode, checked) if self._decode else None
        if length is not None:
            self.counters.add("rows/stop_string_overrun", live.cut(length))
            ending = live.ending(stopped=True)
        if ending is None:
            return []
        self._leave(live)
        del self._here[live.request.rollout_id]
        return [live.rollout(ending, live.clocks[-1])]

    def _count(self, purpose: str, size: int, steps: int, told: Told, drafts: bool) -> None:
        """Counts a dispatch, and tells the swap policy and the drafting what it cost and gave."""
        total = dict(zip(wire.USES, told.uses.sum(axis=0).tolist()))
        self._carry.used(sum(total.values()) - total["idle"])
        won = int(told.won.sum())
        if drafts:
            offers, decoded = told.offers.sum(axis=0), total["decode"] + total["clone"]
            self.drafting.told(told.counts.sum(axis=0), offers, decoded, total["clone"], won)
            self.counters.add("spec/drafting_steps", steps)
        else:
            self.drafting.quiet(steps)
        self._growth = self.counters.dispatch(purpose, size, steps, total, won)
