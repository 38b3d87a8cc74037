"""The slots and KV-cache pages of one replica: which sequence has which slot, and which sequence is preempted for
another.

Invariant: a sequence in a slot holds the pages of every settled position. Two sequences share pages only of their
prompt, under one version and one purpose.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Callable

from jaxrl_post.engine.host.pages import Pages, PromptPages, Prompts
from jaxrl_post.engine.host.sequence import SequenceState


class Replica:
    """Slots, the free list of pages, and the prompts whose pages are shared."""

    def __init__(self, slots: int, pages: int, page: int):
        self.slots: list[SequenceState | None] = [None] * slots
        self._free = list(range(slots))  # a heap
        self._purposes: Counter[str] = Counter()
        self.pages = Pages(pages, page)
        self.prompts = Prompts(self.pages)

    @property
    def running(self) -> list[SequenceState]:
        """Returns the sequences in slots, oldest first."""
        return sorted((sequence for sequence in self.slots if sequence is not None), key=lambda sequence: sequence.age)

    @property
    def free(self) -> int:
        """Returns the number of free slots."""
        return len(self._free)

    def runs(self, purpose: str) -> bool:
        """Returns whether a sequence of this purpose has a slot."""
        return self._purposes[purpose] > 0

    def seat(self, sequence: SequenceState, entry: PromptPages | None, key: tuple) -> tuple[int, int] | None:
        """Gives the sequence a slot and pages.

        With an `entry` the sequence shares the entry's pages. Without one it leads its prompt's pages under `key`.

        Returns: (page to copy from, page to copy to); both out of range where nothing is to be copied. None, with
        nothing done, when too few pages are free."""
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
            return (entry.ids[whole], taken[0]) if sequence.shared % pages.size else (none, none)
        if sequence.shared > 0:
            self.prompts.lead(key, sequence.slot, sequence.pages[: pages.needed(sequence.shared)])
        return none, none

    def leave(self, sequence: SequenceState) -> None:
        """Takes the sequence's slot and pages back."""
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
                sequence.add_pages(more)
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
