"""The slots and KV-cache pages of one replica: which sequence has which slot, and which sequence is preempted for
another.

Invariant: a sequence in a slot holds the pages of every settled position. Two sequences share pages only of their
prompt, under one version and one purpose. Each copies the last page when it is partly filled. A page is free, or its
reference count is its number of holders; all counts return to zero. Page ids never influence values. Nothing here knows a
device.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from jaxrl_post.engine.host.sequence import SequenceState


class Pages:
    """A pool of `total` pages, each of `size` positions; hands out the page that was freed last."""

    def __init__(self, total: int, size: int):
        self.total, self.size = total, size
        self._counts = np.zeros(total, np.int32)
        self._free = list(range(total - 1, -1, -1))

    @property
    def free(self) -> int:
        return len(self._free)

    def needed(self, positions: int) -> int:
        return -(-positions // self.size)

    def take(self, count: int) -> list[int] | None:
        """Takes `count` pages with one reference each. Returns None, with nothing taken, when too few are free."""
        if count > len(self._free):
            return None
        at = len(self._free) - count
        taken = self._free[at:][::-1]
        del self._free[at:]
        self._counts[taken] = 1
        return taken

    def share(self, ids: list[int]) -> None:
        """Adds one reference to each page."""
        assert all(self._counts[i] > 0 for i in ids), "a free page cannot be shared"
        for i in ids:
            self._counts[i] += 1

    def release(self, ids: list[int]) -> None:
        """Drops one reference of each page, which are all different. A page without references is free again."""
        counts = self._counts[ids] - 1
        assert (counts >= 0).all(), "page released twice"
        self._counts[ids] = counts
        self._free += [i for i, count in zip(ids, counts.tolist()) if count == 0]


class Copy(NamedTuple):
    """What a sequence takes from another one: a page that is partly filled, and a recurrent state.

    - source, target: pages; both out of range where none is copied
    - state: the slot whose state it takes, or its own slot
    """

    source: int
    target: int
    state: int


@dataclass
class PromptPages:
    """Pages that hold positions 0 .. tokens-2 of a prompt, from which other sequences of the prompt start.

    The entry keeps one reference to each page. `ready` says that the pages are computed. Until then `leader` is the
    slot that computes them, and afterwards `state` is the slot that did. A recurrent state stands behind the prompt there, until
    the slot has another row."""

    leader: int
    ids: list[int]
    ready: bool = False
    state: int = -1


@dataclass
class SharedPrompts:
    """Shared prompts of one replica, by a key that names purpose, prompt and version."""

    pages: Pages
    entries: dict[tuple, PromptPages] = field(default_factory=dict)

    def lead(self, key: tuple, slot: int, ids: list[int]) -> None:
        """Registers pages that `slot` will compute. Other sequences of the prompt wait for them."""
        self.pages.share(ids)
        self.entries[key] = PromptPages(slot, list(ids))

    def leaders(self) -> list[int]:
        """Returns the slots that compute a prompt, in the order in which they began."""
        return [entry.leader for entry in self.entries.values() if not entry.ready]

    def finish(self, slot: int) -> None:
        """Marks the pages that `slot` computed as ready."""
        for entry in self.entries.values():
            if entry.leader == slot:
                entry.ready, entry.leader, entry.state = True, -1, slot

    def abandon(self, slot: int) -> None:
        """Drops the entries that `slot` leads and has not finished."""
        for key in [k for k, e in self.entries.items() if e.leader == slot and not e.ready]:
            self.drop(key)

    def drop(self, key: tuple) -> None:
        self.pages.release(self.entries.pop(key).ids)

    def keep_only(self, keys: set[tuple]) -> None:
        """Drops ready entries whose key is not in `keys`."""
        for key in [k for k, e in self.entries.items() if k not in keys and e.ready]:
            self.drop(key)


class Replica:
    """Slots, the free list of pages, and the prompts whose pages are shared."""

    def __init__(self, slots: int, pages: int, page: int):
        self.slots: list[SequenceState | None] = [None] * slots
        self._free = list(range(slots))  # a heap
        self._purposes: Counter[str] = Counter()
        self.pages = Pages(pages, page)
        self.prompts = SharedPrompts(self.pages)

    @property
    def running(self) -> list[SequenceState]:
        """Returns the sequences in slots, oldest first."""
        return sorted((sequence for sequence in self.slots if sequence is not None), key=lambda sequence: sequence.age)

    @property
    def free(self) -> int:
        return len(self._free)

    def runs(self, purpose: str) -> bool:
        return self._purposes[purpose] > 0

    def seat(self, sequence: SequenceState, entry: PromptPages | None, key: tuple) -> Copy | None:
        """Gives the sequence a slot and pages.

        With an `entry` the sequence shares the entry's pages. Without one it leads its prompt's pages under `key`.

        Returns: what to copy. None, with nothing done, when too few pages are free."""
        pages, none = self.pages, self.pages.total
        whole = sequence.shared // pages.size if entry else 0
        taken = pages.take(pages.needed(sequence.num_tokens) - whole)
        if taken is None:
            return None
        sequence.slot = heapq.heappop(self._free)
        self.slots[sequence.slot] = sequence
        self._purposes[sequence.request.purpose] += 1
        sequence.num_computed, sequence.pages = 0, taken
        if entry:
            pages.share(entry.ids[:whole])
            sequence.pages = entry.ids[:whole] + taken
            sequence.num_computed = sequence.shared
            partly = sequence.shared % pages.size
            return Copy(entry.ids[whole], taken[0], entry.state) if partly else Copy(none, none, entry.state)
        if sequence.shared > 0:
            self.prompts.lead(key, sequence.slot, sequence.pages[: pages.needed(sequence.shared)])
        return Copy(none, none, sequence.slot)

    def leave(self, sequence: SequenceState) -> None:
        self.prompts.abandon(sequence.slot)
        self.pages.release(sequence.pages)
        self.slots[sequence.slot] = None
        heapq.heappush(self._free, sequence.slot)
        self._purposes[sequence.request.purpose] -= 1
        sequence.slot, sequence.pages, sequence.num_computed = -1, [], 0

    def victim(self, sequence: SequenceState, purpose: str, version: int) -> SequenceState | None:
        """Returns the sequence to preempt so that `sequence` can grow, or None.

        A victim is younger than `sequence` or of another purpose; the youngest is taken. Sequences with tokens of
        another version are taken last."""
        others = [
            o for o in self.running if o is not sequence and (o.age > sequence.age or o.request.purpose != purpose)
        ]
        current = [o for o in others if o.oldest >= version]
        youngest = (current or others)[-1:]
        return youngest[0] if youngest else None

    def leads(self, sequence: SequenceState) -> bool:
        """Returns whether the sequence computes prompt pages that others can share afterwards."""
        return any(e.leader == sequence.slot and not e.ready for e in self.prompts.entries.values())

    def grow(
        self,
        sequence: SequenceState,
        positions: int,
        purpose: str,
        version: int,
        preempt: Callable[[SequenceState], object],
    ) -> None:
        """Maps the sequence's pages up to `positions`.

        Where pages are short, drops shared prompts, then preempts other sequences. Preempts the sequence itself where
        even its settled tokens have no pages."""
        pages = self.pages
        while pages.needed(positions) > len(sequence.pages):
            more = pages.take(1)
            if more is not None:
                sequence.pages += more
                continue
            before = pages.free
            self.prompts.keep_only(set())
            if pages.free > before:
                continue
            victim = self.victim(sequence, purpose, version)
            if victim is None:
                break
            preempt(victim)
        if pages.needed(sequence.num_tokens) > len(sequence.pages):
            preempt(sequence)
