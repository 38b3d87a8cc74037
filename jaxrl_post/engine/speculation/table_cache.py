"""Which part of a replica's draft tables holds which prompt: least recently used regions are given up first."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field

from jaxrl_post.engine.host.wire import UPLOAD


@dataclass
class Region:
    """Part of a replica's flat tables: `offset`, `size` of it in use, and how many slots use it."""

    offset: int
    room: int
    size: int
    newest: tuple[int, ...]
    users: int = 0


class Shelf:
    """A replica's flat tables: regions of whole UPLOADs, the least recently used ones given up when room is short."""

    def __init__(self, first: int, entries: int):
        self._free = [(first, entries - first)] if entries > first else []
        self.regions: OrderedDict[str, Region] = OrderedDict()

    def take(self, prompt_id: str, size: int, newest: tuple[int, ...]) -> Region | None:
        """A region of `size` entries; None where even giving up all unused ones makes no room."""
        room = -(-size // UPLOAD) * UPLOAD
        while (at := next((i for i, (_, free) in enumerate(self._free) if free >= room), None)) is None:
            unused = next((name for name, region in self.regions.items() if not region.users), None)
            if unused is None:
                return None
            self.drop(unused)
        offset, free = self._free.pop(at)
        if free > room:
            self._free.insert(at, (offset + room, free - room))
        self.regions[prompt_id] = Region(offset, room, size, newest)
        return self.regions[prompt_id]

    def drop(self, prompt_id: str) -> None:
        """Gives a region back; neighbours that are free become one."""
        region = self.regions.pop(prompt_id)
        spans = sorted([*self._free, (region.offset, region.room)])
        self._free = spans[:1]
        for offset, size in spans[1:]:
            last, length = self._free[-1]
            if last + length == offset:
                self._free[-1] = (last, length + size)
            else:
                self._free.append((offset, size))


@dataclass
class Shared:
    """Rows of a replica's live table, one a prompt; the least recently used is given to a new prompt."""

    rows: int
    of: OrderedDict[str, int] = field(default_factory=OrderedDict)
    users: dict[str, int] = field(default_factory=dict)

    def enter(self, prompt_id: str) -> tuple[int, bool]:
        """The prompt's row, and whether it is new to it."""
        self.users[prompt_id] = self.users.get(prompt_id, 0) + 1
        fresh = prompt_id not in self.of
        if fresh:
            row = len(self.of)
            if row == self.rows:
                row = self.of.pop(next(name for name in self.of if not self.users.get(name)))
            self.of[prompt_id] = row
        self.of.move_to_end(prompt_id)
        return self.of[prompt_id], fresh

    def leave(self, prompt_id: str) -> None:
        self.users[prompt_id] -= 1
        if not self.users[prompt_id]:
            del self.users[prompt_id]
