"""A cache of prompts' tables in a replica's draft tables: the least recently used regions are evicted first."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field

from jaxrl_post.engine.host.wire import UPLOAD


@dataclass
class Region:
    """A part of a replica's flat tables.

    `offset`, `room`: first entry and length. `size`: entries in use. `newest`: epochs that the table was built from.
    `users`: slots that read it."""

    offset: int
    room: int
    size: int
    newest: tuple[int, ...]
    users: int = 0


class Shelf:
    """A replica's flat tables: regions of whole UPLOADs. The least recently used unused regions are evicted when room
    is short."""

    def __init__(self, first: int, entries: int):
        self._free = [(first, entries - first)] if entries > first else []
        self.regions: OrderedDict[str, Region] = OrderedDict()

    def take(self, prompt_id: str, size: int, newest: tuple[int, ...]) -> Region | None:
        """Returns a region of `size` entries, or None where evicting all unused regions makes no room."""
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
        """Frees a region. Free neighbours are merged."""
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
    """Rows of a replica's live table, one for each prompt. A new prompt gets the least recently used row."""

    rows: int
    of: OrderedDict[str, int] = field(default_factory=OrderedDict)
    users: dict[str, int] = field(default_factory=dict)

    def enter(self, prompt_id: str) -> tuple[int, bool]:
        """Returns the prompt's row, and whether the row is new to the prompt."""
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
        """Counts one sequence of the prompt less."""
        self.users[prompt_id] -= 1
        if not self.users[prompt_id]:
            del self.users[prompt_id]
