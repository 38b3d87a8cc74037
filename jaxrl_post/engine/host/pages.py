"""Who holds which page: the free list of one replica, page lists of slots, and prompts whose pages are shared.

Invariant: a page is free or its reference count is the number of holders, and every count returns to zero. Full prompt
pages are shared by all answers of a prompt under one version; the last, partly filled one is copied by each. Page ids never
influence values. Nothing here knows a device.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np


class Pages:
    """`total` pages of `size` positions. Hands out the lowest free ids."""

    def __init__(self, total: int, size: int):
        self.total, self.size = total, size
        self._counts = np.zeros(total, np.int32)
        self._free = list(range(total - 1, -1, -1))

    @property
    def free(self) -> int:
        return len(self._free)

    def needed(self, positions: int) -> int:
        """Pages that hold so many positions."""
        return -(-positions // self.size)

    def take(self, count: int) -> list[int] | None:
        """`count` pages with one reference each, or None and nothing taken when there are too few."""
        if count > len(self._free):
            return None
        taken = [self._free.pop() for _ in range(count)]
        self._counts[taken] = 1
        return taken

    def share(self, ids: list[int]) -> None:
        """One more reference to each."""
        assert all(self._counts[i] > 0 for i in ids), "a free page cannot be shared"
        for i in ids:
            self._counts[i] += 1

    def release(self, ids: list[int]) -> None:
        """One reference less; pages nobody holds are free again."""
        for i in ids:
            assert self._counts[i] > 0, "page released twice"
            self._counts[i] -= 1
            if self._counts[i] == 0:
                self._free.append(i)


@dataclass
class PromptPages:
    """Pages that hold positions 0 .. tokens-2 of a prompt: what a new answer can start from. The entry keeps one
    reference to each. `ready` once they are computed; until then `leader` is the slot that computes them."""

    leader: int
    ids: list[int]
    ready: bool = False


@dataclass
class Prompts:
    """Shared prompts of one replica, by a key that names prompt and version."""

    pages: Pages
    entries: dict[tuple, PromptPages] = field(default_factory=dict)

    def lead(self, key: tuple, slot: int, ids: list[int]) -> None:
        """`slot` is about to compute these pages; others wait for it."""
        self.pages.share(ids)
        self.entries[key] = PromptPages(slot, list(ids))

    def finish(self, slot: int) -> None:
        """`slot` has computed what it led."""
        for entry in self.entries.values():
            if entry.leader == slot:
                entry.ready, entry.leader = True, -1

    def abandon(self, slot: int) -> None:
        """`slot` leaves; what it led and did not finish is nobody's."""
        for key in [k for k, e in self.entries.items() if e.leader == slot and not e.ready]:
            self.drop(key)

    def drop(self, key: tuple) -> None:
        self.pages.release(self.entries.pop(key).ids)

    def keep_only(self, keys: set[tuple]) -> None:
        """Drops prompts that nobody waits for, unless somebody is computing them."""
        for key in [k for k, e in self.entries.items() if k not in keys and e.ready]:
            self.drop(key)
