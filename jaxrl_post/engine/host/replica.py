"""One block of slots and pages: who sits there, who may take whose place, and what a seat costs.

Invariant: an answer in a slot holds the pages of every settled position; what two answers share is a prompt's, under one
version and of one purpose.
"""

from __future__ import annotations

from collections.abc import Callable

from jaxrl_post.engine.host.pages import Pages, PromptPages, Prompts
from jaxrl_post.engine.host.sequence import Live


class Replica:
    """Slots, the free list of pages, and the prompts whose pages are shared."""

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

    def seat(self, live: Live, entry: PromptPages | None, key: tuple) -> tuple[int, int] | None:
        """Gives a slot and pages, those of `entry` shared; without one the answer leads its prompt's pages under `key`.
        (page to copy from, page to copy to), out of range for none. None, and nothing done: too few pages."""
        pages, none = self.pages, self.pages.total
        whole = live.shared // pages.size if entry else 0
        taken = pages.take(pages.needed(live.known) - whole)
        if taken is None:
            return None
        live.slot = self.slots.index(None)
        self.slots[live.slot] = live
        live.filled, live.pages = 0, taken
        if entry:
            pages.share(entry.ids[:whole])
            live.pages = entry.ids[:whole] + taken
            live.filled = live.shared
            return (entry.ids[whole], taken[0]) if live.shared % pages.size else (none, none)
        if live.shared > 0:
            self.prompts.lead(key, live.slot, live.pages[: pages.needed(live.shared)])
        return none, none

    def leave(self, live: Live) -> None:
        """Takes slot and pages back."""
        self.prompts.abandon(live.slot)
        self.pages.release(live.pages)
        self.slots[live.slot] = None
        live.slot, live.pages, live.filled = -1, [], 0

    def victim(self, live: Live, purpose: str, version: int) -> Live | None:
        """Who makes room for `live`: the youngest that is younger, or of another purpose; one with tokens of another version
        only when there is no other."""
        others = [o for o in self.running if o is not live and (o.age > live.age or o.request.purpose != purpose)]
        current = [o for o in others if all(v == version for v in o.versions)]
        return (current or others or [None])[-1]

    def leads(self, live: Live) -> bool:
        """Whether others wait for the pages that it computes."""
        return any(e.leader == live.slot and not e.ready for e in self.prompts.entries.values())

    def grow(self, live: Live, positions: int, purpose: str, version: int, preempt: Callable[[Live], object]) -> None:
        """Maps pages of a rollout up to `positions`. Shared prompts are dropped first, then others are preempted; the rollout
        itself is preempted where even its present text has no pages."""
        pages = self.pages
        while pages.needed(positions) > len(live.pages):
            more = pages.take(1)
            if more is not None:
                live.pages += more
                continue
            before = pages.free
            self.prompts.keep_only(set())
            if pages.free > before:
                continue
            victim = self.victim(live, purpose, version)
            if victim is None:
                break
            preempt(victim)
        if pages.needed(live.known) > len(live.pages):
            preempt(live)
