"""The row engine: slots, pages and programs put together behind the Engine protocol.

Per `step`: admit what waits (a prompt's first answer computes its pages, the others start from them), map pages for the
expected growth (parking the youngest if it must), choose a row size from the cost table, dispatch, and collect.

Invariant: all of that decides when a token is computed, never which. It refuses what can never fit, and it never
recompiles.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from jaxrl_post import cost as costs
from jaxrl_post import mesh as meshes
from jaxrl_post import weights
from jaxrl_post.engine import rows as device
from jaxrl_post.engine.drafting import Drafting
from jaxrl_post.engine.drafts import ROW, Off
from jaxrl_post.engine.live import Live, begin, revived, written
from jaxrl_post.engine.programs import Programs
from jaxrl_post.models import decoder
from jaxrl_post.pages import Pages, Prompts
from jaxrl_post.types import MOST_ENDS, Capacity, Finish, Layout, Prompt, Request, Rollout, RolloutId

NEVER = 1 << 30


class Held(NamedTuple):
    """Weights, and whether nobody but the engine uses them."""

    params: Any
    owned: bool


class Replica:
    """The host's side of one block of slots and pages."""

    def __init__(self, slots: int, pages: int, page: int):
        self.slots: list[Live | None] = [None] * slots
        self.pages = Pages(pages, page)
        self.prompts = Prompts(self.pages)

    @property
    def running(self) -> list[Live]:
        """Occupied slots, oldest first."""
        return sorted((live for live in self.slots if live is not None), key=lambda live: live.age)

    @property
    def free(self) -> int:
        return self.slots.count(None)


class RowEngine:
    """protocols.Engine over the row program. Sizes are per replica; there are mesh data*fsdp replicas."""

    def __init__(self, model: decoder.ModelConfig, params: Any, mesh: jax.sharding.Mesh, *, slots: int, max_length: int,
                 page_size: int, pages: int, row_sizes: Sequence[int], head_rows: int, steps_per_dispatch: int,
                 refill_slots: int, restricted: bool = False, dtype: Any = np.float32, cost: costs.StepCost | None = None,
                 decode: Callable[[np.ndarray], str] | None = None, version: int = 0, drafting: Drafting | None = None):
        meshes.check_divisible(mesh, decoder.axes(model), decoder.abstract(model), "engine",
                               {"heads": model.heads, "kv_heads": model.kv_heads})
        if max_length > model.max_length:
            raise ValueError(f"engine.max_length={max_length} is beyond the model's {model.max_length} positions; the "
                             f"nearest valid value is {model.max_length}")
        if max(row_sizes) < slots:
            raise ValueError(f"engine.row_sizes={tuple(row_sizes)} must reach engine.slots={slots}: every running slot "
                             f"needs a row; nearest valid size is {slots}")
        if pages * page_size < max_length:
            raise ValueError(f"engine.pages={pages} of {page_size} cannot hold one rollout of engine.max_length="
                             f"{max_length}; the nearest valid value is {-(-max_length // page_size)}")
        replicas = meshes.replicas(mesh)
        sizes = device.Sizes.of(replicas, slots=slots, max_length=max_length, page_size=page_size, pages=pages,
                                head_rows=head_rows, steps_per_dispatch=steps_per_dispatch, restricted=restricted)
        self._model, self._decode, self._refill = model, decode, refill_slots
        self._layout = weights.Layout(meshes.param_shardings(mesh, decoder.axes(model), "engine"), dtype)
        self.case = self._layout.case(params)
        self._params = self._layout.place(params)
        self._owned = self._params is not params
        self._version = version
        self.drafting = drafting or Drafting(Off(), replicas=replicas, slots=slots, past=lambda prompt_id: ())
        self._programs = Programs(model, mesh, sizes, tuple(sorted(row_sizes)), dtype, self.drafting.drafter)
        self._programs.compile(self._params)
        self._state, self._tables = self._programs.blank()
        self.row_sizes = tuple(sorted(row_sizes))
        self.cost = cost or costs.analytic(jax.devices()[0].device_kind, _count(params), np.dtype(dtype).itemsize,
                                           row_sizes)
        self._replicas = [Replica(slots, pages, page_size) for _ in range(replicas)]
        self.reset()

    @property
    def sizes(self) -> device.Sizes:
        return self._programs.sizes

    @property
    def layout(self) -> Layout:
        return Layout(self.sizes.replicas, self._programs.mesh.shape[meshes.TENSOR])

    @property
    def vocab_size(self) -> int:
        return self._model.vocab_size

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
        self._counts: dict[str, float] = {}
        self.drafting.reset()

    # ---- what the loop sees

    @property
    def capacity(self) -> Capacity:
        waiting = [sum(live.request.replica == d for live in self._waiting) for d in range(len(self._replicas))]
        return Capacity(slots=tuple(max(r.free - w, 0) for r, w in zip(self._replicas, waiting)),
                        pages=tuple(r.pages.free for r in self._replicas))

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
            self._check(request, here)
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

    def _check(self, request: Request, here: set[RolloutId]) -> None:
        need, most = request.prompt.tokens.size + request.max_tokens, self.sizes.max_length
        ends = len(request.sampling.eos_ids) + len(request.sampling.stop_ids)
        if need > most:
            raise ValueError(f"request {request.rollout_id}: prompt of {request.prompt.tokens.size} and max_tokens="
                             f"{request.max_tokens} need {need} positions, engine.max_length={most}; the largest valid "
                             f"max_tokens is {most - request.prompt.tokens.size}")
        if not 0 <= request.replica < len(self._replicas):
            raise ValueError(f"request {request.rollout_id}: replica {request.replica} of {len(self._replicas)}")
        if request.rollout_id in here:
            raise ValueError(f"request {request.rollout_id} is already in the engine")
        if ends > MOST_ENDS:
            raise ValueError(f"request {request.rollout_id}: {ends} eos and stop ids, at most {MOST_ENDS}")
        if request.sampling.restricted and not self.sizes.restricted:
            raise ValueError(f"request {request.rollout_id}: top_k={request.sampling.top_k} and top_p="
                             f"{request.sampling.top_p} need an engine with restricted=True; the nearest valid values are "
                             "0 and 1.0")
        if request.sampling.stop_strings and self._decode is None:
            raise ValueError(f"request {request.rollout_id}: stop_strings need an engine with a tokenizer")
        if np.any(request.prompt.tokens < 0) or np.any(request.prompt.tokens >= self._model.vocab_size):
            raise ValueError(f"request {request.rollout_id}: prompt has a token outside 0..{self._model.vocab_size - 1}")

    def cancel(self, ids: Iterable[RolloutId]) -> None:
        self._take_out(ids)

    def park(self, ids: Iterable[RolloutId]) -> list[Rollout]:
        lives = self._take_out(ids)
        return sorted((live.rollout(Finish.PARKED, self._clock[live.request.purpose]) for live in lives),
                      key=lambda rollout: rollout.id)

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
        self._layout.check(self._params, params)
        self._params = self._layout.replace(self._params, params)
        self._owned = self._params is not params
        self._version = version
        for replica in self._replicas:
            for live in replica.running:
                self._carry_over(replica, live)

    def _carry_over(self, replica: Replica, live: Live) -> None:
        """A live request at a swap keeps tokens and KV; one that has no token yet starts again, so that its tokens, all of
        the new version, are what the new weights give."""
        if live.tokens:
            self._add("swap/num_kept", 1)
            replica.prompts.abandon(live.slot)
        else:
            self._add("swap/num_started_again", 1)
            self._leave(live)
            self._waiting.append(live)

    def state_dict(self) -> dict:
        for replica in self._replicas:
            for live in replica.running:
                self._leave(live)
                self._waiting.append(live)
            replica.prompts.keep_only(set())
        self.drafting.rest()
        lives = sorted(self._here.values(), key=lambda live: live.age)
        return {"age": self._age, "clock": dict(self._clock), "growth": self._growth, "counts": dict(self._counts),
                "row_sizes": list(self.row_sizes), "cost": self.cost.digest, "lives": [written(live) for live in lives],
                "drafting": self.drafting.state_dict()}

    def load_state_dict(self, state: Mapping, prompts: Mapping[str, Prompt]) -> None:
        if state["cost"] != self.cost.digest:
            raise ValueError(f"engine: the run was saved under cost table {state['cost']} and would go on under "
                             f"{self.cost.digest} ({self.cost.source}), which gives other row sizes; use the first")
        self.reset()
        self._age, self._clock, self._growth = state["age"], dict(state["clock"]), state["growth"]
        self._counts, self.row_sizes = dict(state["counts"]), tuple(state["row_sizes"])
        self.drafting.load_state_dict(state["drafting"])
        self._queue(revived(live, prompts) for live in state["lives"])

    def relayout(self, layout: Layout) -> None:
        if layout != self.layout:
            raise ValueError(f"engine: {layout} was asked for, only {self.layout} was compiled; name others in engine.layouts")

    def rehearse(self, params: Any) -> None:
        """A swap to these weights that is none: whatever a later swap runs is compiled then."""
        self._layout.check(self._params, params)
        self._params = self._layout.replace(self._params, params)
        self._owned = self._params is not params

    def lay_down(self) -> Held:
        """Gives up pages and tables and hands its weights out. Until `take_up` it holds nothing on a device."""
        drop((self._state, self._tables))
        held = Held(self._params, self._owned)
        self._params = self._state = self._tables = None
        return held

    def take_up(self, held: Held, version: int) -> None:
        """Weights that an engine of another layout laid down, used up where it owned them; pages and tables are empty."""
        assert self._params is None, "it holds weights already"
        self._params, self._owned, self._version = self._layout.bring(held.params, held.owned), True, version
        self._state, self._tables = self._programs.blank()

    def metrics(self) -> dict[str, float]:
        counts, self._counts = self._counts, {}
        return {name: counts[name] for name in sorted(counts)}

    def step(self) -> list[Rollout]:
        done, self._finished = self._finished, []
        results = [live.rollout(how, live.clocks[-1] if live.clocks else self._clock[live.request.purpose])
                   for live, how in done]
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
        self._insert(admitted)

    def _evict(self, replica: Replica, purpose: str) -> bool:
        """While nothing of this purpose runs, makes room: parks the youngest of another, then drops shared prompts."""
        if any(live.request.purpose == purpose for live in replica.running):
            return False
        if replica.running:
            self._preempt(replica, replica.running[-1])
            return True
        held = bool(replica.prompts.entries)
        replica.prompts.keep_only(set())
        return held

    def _key(self, live: Live) -> tuple[str, str, int]:
        """Whose prompt pages it can share: never those of another version, nor of a purpose that stands still."""
        return live.request.purpose, live.request.prompt.id, self._version

    def _seat(self, replica: Replica, live: Live, entry) -> tuple[int, int] | None:
        """Gives a slot and pages; (page to copy from, page to copy to), out of range for none. None: too few pages."""
        pages, none = replica.pages, replica.pages.total
        whole = live.shared // pages.size if entry else 0
        taken = pages.take(pages.needed(live.known) - whole)
        if taken is None:
            return None
        if any(v != self._version for v in live.versions):
            self._add("sched/recomputed_older_versions", 1)
        live.slot = replica.slots.index(None)
        replica.slots[live.slot] = live
        live.filled, live.pages = 0, taken
        if self.drafting.active:
            self._open(live)
        if live.start_clock < 0:
            live.start_clock = self._clock[live.request.purpose]
        if entry:
            pages.share(entry.ids[:whole])
            live.pages = entry.ids[:whole] + taken
            live.filled = live.shared
            return (entry.ids[whole], taken[0]) if live.shared % pages.size else (none, none)
        if live.shared > 0:
            replica.prompts.lead(self._key(live), live.slot, live.pages[:pages.needed(live.shared)])
        return none, none

    def _insert(self, admitted: list[tuple[Live, int, int]], slots: Sequence[int] | None = None) -> None:
        """Puts the texts of admitted requests on the device, with (page to copy from, page to copy to) of each, into their
        own slots or into `slots`."""
        s = self.sizes
        slots = slots or [live.slot for live, _, _ in admitted]
        by_replica = [[(*a, slot) for a, slot in zip(admitted, slots) if a[0].request.replica == d]
                      for d in range(s.replicas)]
        for begin_at in range(0, max(map(len, by_replica)), s.inserts):
            shape = (s.replicas, s.inserts)
            entry = device.Entry(slot=np.full(shape, s.slots, np.int32), source=np.full(shape, s.pages, np.int32),
                                 target=np.full(shape, s.pages, np.int32),
                                 tokens=np.zeros((*shape, s.max_length), np.int32),
                                 favourites=np.zeros((*shape, self._programs.watched), np.int32),
                                 **{name: np.zeros(shape, np.int32) for name in ("known", "row", "fresh", "seen")})
            for d, mine in enumerate(by_replica):
                for i, (live, copy_from, copy_to, at) in enumerate(mine[begin_at:begin_at + s.inserts]):
                    text = live.text()[:s.max_length]
                    entry.slot[d, i], entry.source[d, i], entry.target[d, i] = at, copy_from, copy_to
                    entry.tokens[d, i, :text.size], entry.known[d, i] = text, live.known
                    entry.favourites[d, i, :live.known] = live.learnable()[:self._programs.watched]
                    entry.seen[d, i] = live.known
                    if live.place is not None:
                        entry.row[d, i], entry.fresh[d, i], entry.seen[d, i] = live.place[ROW], live.seen == 0, live.seen
                        live.seen = live.known
            self._state = self._programs.insert(self._state, entry)

    # ---- pages

    def _map(self, purpose: str) -> None:
        """Maps pages for the expected growth, oldest first."""
        growth = int(self.sizes.steps * self._growth) + 1
        for replica in self._replicas:
            for live in replica.running:
                if live.slot >= 0 and live.request.purpose == purpose:
                    self._grow(replica, live, min(live.known + growth, live.limit - 1), purpose)

    def _grow(self, replica: Replica, live: Live, positions: int, purpose: str) -> None:
        pages = replica.pages
        while pages.needed(positions) > len(live.pages):
            more = pages.take(1)
            if more is not None:
                live.pages += more
                continue
            before = pages.free
            replica.prompts.keep_only(set())
            if pages.free > before:
                continue
            victim = self._victim(replica, live, purpose)
            if victim is None:
                break
            self._preempt(replica, victim)
        if pages.needed(live.known) > len(live.pages):
            self._preempt(replica, live)

    def _victim(self, replica: Replica, live: Live, purpose: str) -> Live | None:
        """The youngest that is younger, or of another purpose; one with older tokens only when there is no other."""
        others = [o for o in replica.running if o is not live and (o.age > live.age or o.request.purpose != purpose)]
        current = [o for o in others if all(v == self._version for v in o.versions)]
        return (current or others or [None])[-1]

    def _preempt(self, replica: Replica, live: Live) -> None:
        """Parks a slot; it resumes later with its tokens forced and its guesses kept."""
        self._add("sched/preemptions", 1)
        self._leave(live)
        self._waiting.append(live)

    def _leave(self, live: Live) -> None:
        replica = self._replicas[live.request.replica]
        replica.prompts.abandon(live.slot)
        replica.pages.release(live.pages)
        replica.slots[live.slot] = None
        if live.place is not None:
            self.drafting.leave(live.request.replica, live.request.prompt, live.place)
        live.slot, live.pages, live.filled, live.place = -1, [], 0, None

    # ---- the dispatch

    def _run(self, purpose: str) -> list[Rollout]:
        packed, lives = self._pack(purpose)
        if not lives:
            return []
        waiting = any(w.request.purpose == purpose for w in self._waiting)
        size, drafts = self._size(lives, waiting)
        if drafts:
            self._show(lives, packed)
        clones = self._clone(lives, packed, size) if drafts and not waiting else []
        self._state, told = self._programs.dispatch(
            size, drafts, self._params, self._tables, self._state, packed, steps=self.sizes.steps,
            freed=self._refill if waiting else NEVER, clones=bool(clones))
        for replica, pages in clones:
            replica.pages.release(pages)
        clock, steps = self._clock[purpose], int(told.steps)
        self._clock[purpose] += steps
        self._count(purpose, size, steps, told, drafts)
        return [rollout for live in lives
                for rollout in self._collect(live, told.out[live.request.replica, live.slot], clock, drafts)]

    def _clone(self, lives: list[Live], packed: np.ndarray, size: int) -> list[tuple[Replica, list[int]]]:
        """Gives free slots to answers that only decode and have no candidates, as long as there are rows and pages: the
        youngest, which have most before them, first. A clone shares the pages that are full and has its own of those still
        written to; what it holds, for the time of one dispatch."""
        held, copies = [], []
        for d, replica in enumerate(self._replicas):
            mine = [live for live in lives if live.request.replica == d and live.filled == live.known - 1
                    and not live.guesses]
            free = [i for i in range(self.sizes.slots) if replica.slots[i] is None]
            rows = size - sum(live.request.replica == d for live in lives)
            for number, slot in enumerate(free[:self.drafting.clones_of(rows, len(mine), len(free))]):
                live = mine[-1 - number % len(mine)]
                whole = live.filled // replica.pages.size
                own = replica.pages.take(len(live.pages) - whole)
                if own is None:
                    break
                row = packed[d, slot]
                order = row[device.ORDER]
                row[:] = packed[d, live.slot]
                row[device.ORDER] = order
                row[device.WATCH], row[device.LEADER], row[device.BRANCH] = 0, live.slot, 1 + number // len(mine)
                row[device.TABLE + whole:device.TABLE + len(live.pages)] = own
                copies.append((live, slot, live.pages[whole], own[0]))
                held.append((replica, own))
        self._insert([(live, source, target) for live, _, source, target in copies], [slot for _, slot, _, _ in copies])
        return held

    def _show(self, lives: list[Live], packed: np.ndarray) -> None:
        """Before `lives` draft: the tables learn what was recorded and what drafts were worth, the live table the tokens that
        came without drafts."""
        for live in lives:
            if live.place is None:
                self._open(live)
            packed[live.request.replica, live.slot, device.DRAFTS:device.FIRST_END] = live.place
        for piece in self.drafting.uploads():
            self._tables = self._programs.upload(self._tables, *piece)
        self._tables = self._programs.rated(self._tables, self.drafting.estimates.rates())
        none = self.sizes.pages
        self._insert([(live, none, none) for live in lives if live.seen < live.known])

    def _open(self, live: Live) -> None:
        """From now on it has a place in the drafter's tables."""
        live.place, fresh = self.drafting.open(live.request.replica, live.request.prompt)
        live.seen = 0 if fresh else live.prompt_length

    def _pack(self, purpose: str) -> tuple[np.ndarray, list[Live]]:
        s = self.sizes
        packed = np.zeros((s.replicas, s.slots, device.TABLE + s.blocks), np.int32)
        packed[..., device.TABLE:] = s.pages
        packed[..., device.FIRST_END:device.TABLE] = -1
        packed[..., device.LEADER] = np.arange(s.slots)
        waiting = {(w.request.replica, self._key(w)) for w in self._waiting}
        lives = []
        for d, replica in enumerate(self._replicas):
            order = [live.slot for live in replica.running]
            packed[d, :, device.ORDER] = order + [i for i in range(s.slots) if replica.slots[i] is None]
            for live in replica.running:
                if live.request.purpose == purpose:
                    watch = replica.free and (d, self._key(live)) in waiting
                    self._describe(live, packed[d, live.slot], replica, bool(watch))
                    lives.append(live)
        return packed, lives

    def _describe(self, live: Live, row: np.ndarray, replica: Replica, watched: bool) -> None:
        sampling = live.request.sampling
        leads = any(e.leader == live.slot and not e.ready for e in replica.prompts.entries.values())
        row[device.ACTIVE] = 1
        row[device.KNOWN], row[device.FILLED] = live.known, live.filled
        row[device.GUESSED] = live.known + len(live.guesses)
        row[device.LIMIT] = live.limit
        row[device.MAPPED] = len(live.pages) * replica.pages.size
        row[device.WATCH] = live.shared if leads and watched else 0
        row[device.SEED0:device.SEED1 + 1] = live.request.seed.view(np.int32)
        row[device.TEMPERATURE] = np.float32(sampling.temperature).view(np.int32)
        row[device.LEADER] = live.slot
        row[device.TOP_K], row[device.TOP_P] = sampling.top_k, np.float32(sampling.top_p).view(np.int32)
        ends = sampling.eos_ids + sampling.stop_ids
        row[device.FIRST_END:device.FIRST_END + len(ends)] = ends
        row[device.TABLE:device.TABLE + len(live.pages)] = live.pages

    def _size(self, lives: list[Live], waiting: bool) -> tuple[int, bool]:
        """The best of the kept row sizes for the busiest replica, and whether to draft."""
        running, backlog = np.zeros(len(self._replicas), int), np.zeros(len(self._replicas), int)
        for live in lives:
            running[live.request.replica] += 1
            backlog[live.request.replica] += live.known - live.filled - 1 + len(live.guesses)
        busiest = int(np.argmax(running + backlog))
        most, behind = int(running.max()), backlog[busiest] / self.sizes.steps
        free = 0 if waiting else self.sizes.slots - most
        return costs.best_size(self.cost, self.row_sizes, most, behind, must_draft=self.drafting.due,
                               worth=lambda rows: self.drafting.worth(rows, most, free))

    def _collect(self, live: Live, out: np.ndarray, clock: int, drafts: bool) -> list[Rollout]:
        s, replica = self.sizes, self._replicas[live.request.replica]
        new = int(out[device.OUT_KNOWN]) - live.known
        blocks = out[device.OUT_WINDOW:].reshape(5, s.emit)[:, :new]
        checked = len(live.tokens)
        live.extend(blocks[0], blocks[1].view(np.float32), blocks[2].view(np.float32), blocks[3] % 2,
                    clock + blocks[3] // 2 + 1, self._version, blocks[4])
        live.filled = int(out[device.OUT_FILLED])
        live.seen = live.known if drafts else live.seen
        if live.filled >= live.shared:
            replica.prompts.finish(live.slot)
        ending = live.ending()
        length = live.stopped_at(self._decode, checked) if self._decode else None
        if length is not None:
            self._add("rows/stop_string_overrun", live.cut(length))
            ending = live.ending() or Finish.STOP
        if ending is None:
            return []
        self._leave(live)
        del self._here[live.request.rollout_id]
        return [live.rollout(ending, live.clocks[-1])]

    def _count(self, purpose: str, size: int, steps: int, told: device.Told, drafts: bool) -> None:
        total = dict(zip(device.USES, told.uses.sum(axis=0).tolist()))
        if drafts:
            self.drafting.told(told.counts.sum(axis=0), told.offers.sum(axis=0), total["decode"] + total["clone"],
                               total["clone"], int(told.won.sum()))
            self._add("spec/drafting_steps", steps)
        else:
            self.drafting.quiet()
        accepted = total["draft_accepted"] + int(told.won.sum())
        self._growth = 1.0 + accepted / max(1, total["decode"])
        if purpose == "train":
            self._add("spec/num_drafted", total["draft_accepted"] + total["draft_rejected"] + total["clone"])
            self._add("spec/num_accepted", accepted)
        prefix = "rows" if purpose == "train" else "eval/rows"
        for use, count in total.items():
            self._add(f"{prefix}/{use}", count)
        self._add(f"{prefix}/steps", steps)
        self._add(f"{prefix}/dispatches", 1)
        self._add(f"{prefix}/size_{size}", steps)

    def _add(self, name: str, amount: float) -> None:
        self._counts[name] = self._counts.get(name, 0) + amount


def drop(tree: Any) -> None:
    """Frees the memory of device arrays now, not when nobody names them any more."""
    for leaf in jax.tree.leaves(tree):
        leaf.delete()


def _count(params: Any) -> int:
    return sum(leaf.size for leaf in jax.tree.leaves(params))
