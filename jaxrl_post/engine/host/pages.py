"""KV-cache pages of one replica on the host: the free list, reference counts, and prompts whose pages are shared.

Invariant: a page is free, or its reference count is its number of holders; all counts return to zero. Sequences of one
prompt share its full pages under one version. Each sequence copies the last page when it is partly filled. Page ids
never influence values. Nothing here knows a device.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np


class Pages:
    """A pool of `total` pages, each of `size` positions; hands out the page that was freed last."""

    def __init__(self, total: int, size: int):
        self.total, self.size = total, size
        self._counts = np.zeros(total, np.int32)
        self._free = list(range(total - 1, -1, -1))

    @property
    def free(self) -> int:
        """Returns the number of free pages."""
        return len(self._free)

    def needed(self, positions: int) -> int:
        """Returns the number of pages that hold `positions` positions."""
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


@dataclass
class PromptPages:
    """Pages that hold positions 0 .. tokens-2 of a prompt, from which other sequences of the prompt start.

    The entry keeps one reference to each page. `ready` says that the pages are computed. Until then `leader` is the
    slot that computes them."""

    leader: int
    ids: list[int]
    ready: bool = False


@dataclass
class Prompts:
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
                entry.ready, entry.leader = True, -1

    def abandon(self, slot: int) -> None:
        """Drops the entries that `slot` leads and has not finished."""
        for key in [k for k, e in self.entries.items() if e.leader == slot and not e.ready]:
            self.drop(key)

    def drop(self, key: tuple) -> None:
        """Removes an entry and its references."""
        self.pages.release(self.entries.pop(key).ids)

    def keep_only(self, keys: set[tuple]) -> None:
        """Drops ready entries whose key is not in `keys`."""
        for key in [k for k, e in self.entries.items() if k not in keys and e.ready]:
            self.drop(key)
