"""The host side of speculative decoding: each prompt's part of the tables, their contents, and acceptance rates.

A prompt's table is built from its past before one of its sequences drafts. The table stays until its space is needed.
Where drafting does not pay, it costs nothing.

Invariant: everything follows from the groups recorded, the order of admission and counts of drafts, so every process
of a job has the same state. No token depends on it.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from jaxrl_post.engine.host import wire
from jaxrl_post.engine.host.wire import OFFERS, UPLOAD
from jaxrl_post.engine.speculation.acceptance import Estimates, Value
from jaxrl_post.engine.speculation.corpus import Corpus
from jaxrl_post.engine.speculation.interface import Drafter
from jaxrl_post.engine.speculation.ngrams import Texts
from jaxrl_post.ring.history import Past
from jaxrl_post.ring.types import Group, Prompt, RolloutId

MOST_BRANCHES = 7  # clones of one sequence
LEAST = 0.5  # weight of drafts for a sequence that is about to end


@dataclass
class Region:
    """A part of a replica's flat tables."""

    offset: int  # its first entry
    room: int  # its length
    size: int  # entries in use
    newest: tuple[int, ...]  # epochs that the table was built from
    users: int = 0  # slots that read it


class TableCache:
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
        self.users[prompt_id] -= 1
        if not self.users[prompt_id]:
            del self.users[prompt_id]


class Drafting:
    """The host side of one engine's drafter.

    Args:
      past: returns the remembered epochs of a prompt, newest first.
      shared: entries of the table over all prompts; 0: no such table.
      clones: whether free slots may try other drafts for running sequences.
    """

    def __init__(
        self,
        drafter: Drafter,
        *,
        replicas: int,
        slots: int,
        past: Callable[[str], Sequence[Past]],
        shared: int = 0,
        clones: bool = False,
    ):
        self.drafter, self._past, self.clones = drafter, past, clones and drafter.width > 0
        self.corpus = Corpus(shared) if shared else None
        self._first = -(-shared // UPLOAD) * UPLOAD
        self._replicas, self._slots = replicas, slots
        self.forced: bool | None = None  # a probe sets it: whether to draft, whatever drafts are worth
        self.estimates = Estimates(drafter.priors) if drafter.classes else None
        self.reset()

    def reset(self) -> None:
        """Resets everything but recorded groups."""
        self._table_caches = [TableCache(self._first, self.drafter.entries) for _ in range(self._replicas)]
        self._shared = [Shared(self._slots) for _ in range(self._replicas)]
        self._pieces: list[tuple[int, int, tuple[np.ndarray, ...]]] = []
        self._shown = -1  # version of the table over all prompts on the device
        self.value = Value(OFFERS)
        self.active = False  # whether the last dispatch drafted
        self._trying = False  # whether the last dispatch was a trial
        if self.estimates is not None:
            self.estimates = Estimates(self.drafter.priors)

    def record(self, group: Group) -> None:
        """Adds a scored group to the table over all prompts. The device gets it with the next dispatch that drafts."""
        if self.corpus is not None:
            self.corpus.add(
                Texts(
                    group.prompt.tokens,
                    [rollout.tokens for rollout in group.rollouts],
                    [rollout.argmax_tokens for rollout in group.rollouts],
                )
            )

    def open(self, replica: int, prompt: Prompt) -> tuple[np.ndarray, bool]:
        """Opens tables for a sequence in a slot that is about to draft for the first time.

        Returns: its `place` int32[PLACE] (host/wire.py), and whether its row of the live table is new."""
        place = np.zeros(wire.PLACE, np.int32)
        region = self._region(replica, prompt)
        if region is not None:
            region.users += 1
            place[wire.OFFSET], place[wire.SIZE] = region.offset, region.size
        place[wire.ALL_SIZE] = 0 if self.corpus is None else self.corpus.size
        place[wire.ROW], fresh = self._shared[replica].enter(prompt.id)
        return place, fresh

    def leave(self, replica: int, prompt: Prompt, place: np.ndarray) -> None:
        self._shared[replica].leave(prompt.id)
        if place[wire.SIZE]:
            region = self._table_caches[replica].regions.get(prompt.id)
            if region is not None and region.offset == place[wire.OFFSET]:
                region.users -= 1

    def _region(self, replica: int, prompt: Prompt) -> Region | None:
        """Returns the prompt's part of the tables, or None.

        The table is built again where its past has changed and no slot reads the old one."""
        past, cache = self._past(prompt.id), self._table_caches[replica]
        newest = tuple(p.epoch for p in past)
        region = cache.regions.get(prompt.id)
        if region is not None and (region.newest == newest or region.users):
            cache.regions.move_to_end(prompt.id)
            return region
        if region is not None:
            cache.drop(prompt.id)
        arrays = self.drafter.index(past, prompt) if past else ()
        if not arrays or not arrays[0].size:
            return None
        region = cache.take(prompt.id, arrays[0].size, newest)
        if region is not None:
            self._pieces.append((replica, region.offset, arrays))
        return region

    def uploads(self) -> list[tuple[int, int, tuple[np.ndarray, ...]]]:
        """Returns (replica, offset, flat arrays) that the device does not have yet, in order."""
        pieces, self._pieces = self._pieces, []
        if self.corpus is not None and self.corpus.version != self._shown:
            pieces += [(replica, 0, (self.corpus.entries,)) for replica in range(self._replicas)]
            self._shown = self.corpus.version
        return pieces

    # ---- what drafts are worth

    def weights(self, lengths: Mapping[RolloutId, int]) -> dict[RolloutId, np.float32]:
        """Returns the weight of each sequence's drafts: 1 for the sequence expected to finish last, down to LEAST for
        one about to end.

        `lengths`: tokens of running sequences so far. The expected length is that of the prompt's longest rollout in
        the last epoch. A sequence without a past, or beyond that length, may last as long as any, and has weight 1."""
        pasts = {name: self._past(name) for name in {id.prompt_id for id in lengths}}
        longest = {name: float(past[0].lengths.max()) if past else 0.0 for name, past in pasts.items()}
        left = {id: max(longest[id.prompt_id] - length, 0.0) for id, length in lengths.items()}
        most = max(left.values(), default=0.0)
        return {id: np.float32(LEAST + (1 - LEAST) * more / most if more else 1.0) for id, more in left.items()}

    def ran(self, counts: np.ndarray, offers: np.ndarray, used: Mapping[str, int], won: int) -> None:
        """Records a dispatch that drafted, as `record_outcome`. `used`: its rows by use (wire.USES)."""
        right, decoded = used["draft_accepted"], used["decode"] + used["clone"]
        given = right + used["draft_rejected"]
        self.record_outcome(counts, offers, decoded, used["clone"], won, given, right)

    def record_outcome(
        self,
        counts: np.ndarray,
        offers: np.ndarray,
        slot_steps: int,
        clone_steps: int,
        won: int,
        given: int = 0,
        right: int = 0,
    ) -> None:
        """Records a dispatch that drafted.

        `counts`: judged and right drafts of each class. `offers`: offered drafts by estimated chance, over `slot_steps`
        steps of running slots. `won`: tokens that `clone_steps` steps of clones won. `given`: drafts that got rows, of
        which `right` were accepted."""
        self.estimates.add(counts)
        self.value.record_outcome(offers, slot_steps, clone_steps, won, self._trying, given, right)
        self.active = True

    def quiet(self, steps: int) -> None:
        """Records a dispatch of `steps` steps without drafts."""
        self.value.quiet(steps)
        self.active = False

    def due(self, apart: int) -> bool:
        """Returns whether the next dispatch must draft: as a trial, or because a probe forces it. `apart`: least steps
        between trials."""
        self._trying = self.drafter.width > 0 and self.value.due(apart)
        return self._trying if self.forced is None else self.forced

    def worth(self, rows: float, running: int, free: int = 0) -> float:
        """Returns the expected tokens a step from `rows` rows, besides the rows of `running` sequences.

        Rows go to the most promising drafts first, then to clones in `free` slots.
        """
        if self.forced is False or not self.drafter.width:
            return 0.0
        return self.value.drafts(rows, running) + self.clones_of(rows, running, free) * self.value.clone_gain

    def clones_of(self, rows: float, running: int, free: int) -> int:
        """Returns the number of clones that fit into the rows left by the drafts of running sequences.

        A clone takes one row and drafts like its leader.
        """
        if not self.clones:
            return 0
        offered = self.value.offered
        return min(free, MOST_BRANCHES * running, max(0, int((rows - offered * running) / (1.0 + offered))))

    def metrics(self) -> dict[str, float]:
        """Returns the number of prompts with a table, and the expected accepted drafts of a slot in a step."""
        if not self.drafter.width:
            return {}
        return {
            "spec/num_prompts_indexed": float(sum(len(cache.regions) for cache in self._table_caches)),
            "spec/expected_accepted": self.worth(float(1 << 20), 1),
        }

    def state_dict(self) -> dict:
        """Returns plain values and arrays, for a checkpoint. Tables are built again from recorded groups."""
        return {
            "corpus": {} if self.corpus is None else self.corpus.state_dict(),
            "estimates": {} if self.estimates is None else self.estimates.state_dict(),
            "value": self.value.state_dict(),
        }

    def rest(self) -> None:
        """Forgets, at a checkpoint, what a resumed run cannot know."""
        assert not any(shared.users for shared in self._shared), "a slot still drafts"
        estimates, value = self.estimates, self.value
        self.reset()
        self.estimates, self.value = estimates, value

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.reset()
        if self.corpus is not None:
            self.corpus.load_state_dict(state["corpus"])
        if self.estimates is not None:
            self.estimates.load_state_dict(state["estimates"])
        self.value.load_state_dict(state["value"])
