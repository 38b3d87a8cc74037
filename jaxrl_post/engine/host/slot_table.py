"""The slots of all replicas as arrays: what a dispatch reads of every slot, and what it settles in each.

A sequence hands its state over when it gets a slot, and takes it back when it leaves. In between nothing is done slot
by slot but what few slots need in one dispatch: an ending, candidates, stop strings.

Invariant: rows of the matrix describe the sequences in slots, as `packing.describe` does, and all others are blank. New
tokens are stored late, while the next dispatch runs; every reader stores those of its slot first.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from jaxrl_post.engine.host import packing
from jaxrl_post.engine.host import wire as c
from jaxrl_post.engine.host.replica import Replica
from jaxrl_post.engine.host.sequence import NEVER, SequenceState
from jaxrl_post.ring.ragged import Ragged
from jaxrl_post.ring.types import PURPOSES

_FREE = 1 << 62  # the age of a free slot, behind those of all sequences
_TOKEN, _LOGPROB, _ENTROPY, _STAMP, _ARGMAX, _VERSION, _KEPT = range(
    7
)  # words of a stored token; ids of its record follow
_KINDS: dict[str, tuple[int, Any]] = {
    "tokens": (_TOKEN, np.int32),
    "logprobs": (_LOGPROB, np.float32),
    "entropies": (_ENTROPY, np.float32),
    "argmax_tokens": (_ARGMAX, np.int32),
    "versions": (_VERSION, np.int32),
}


@dataclass
class _Late:
    """Tokens of a dispatch that are not stored yet.

    `new`: number of them in each slot, [replicas, S]. `out`: wire.DispatchResult.out. `clock`: before the first step."""

    new: np.ndarray
    out: np.ndarray
    clock: int
    version: int


class SlotTable:
    """Every array is [replicas, S, ...].

    Attributes:
      packed: the matrix of a dispatch (host/wire.py) without what `view` adds.
      placed: whether the sequence has a place in the drafter's tables.
    """

    def __init__(self, sizes: c.EngineSettings):
        shape = (sizes.replicas, sizes.slots)
        self._sizes, self._blank = sizes, packing.blank(sizes)
        self.packed = self._blank.copy()
        self.placed, self._stops = (np.zeros(shape, bool) for _ in range(2))
        self._purpose = np.zeros(shape, np.int8)  # its place in PURPOSES
        self._age, self._oldest = np.full(shape, _FREE), np.full(shape, NEVER)
        self._shared, self._stored, self._seen, self._begun = (np.zeros(shape, np.int64) for _ in range(4))
        # Memory that no token was written to yet costs nothing. `store` writes up to `emit` words behind the last token.
        self._words = np.zeros((*shape, sizes.max_length + sizes.emit, _KEPT + sizes.record), np.int32)
        self._late: _Late | None = None

    # ---- sequences

    def enter(self, one: SequenceState, replica: Replica) -> None:
        """Takes over the state of a sequence that got a slot."""
        at = one.request.replica, one.slot
        self.packed[at] = self._blank[at]
        packing.describe(one, self.packed[at], replica, False)
        self.placed[at], self._purpose[at] = one.place is not None, PURPOSES.index(one.request.purpose)
        self._stops[at] = bool(one.request.sampling.stop_strings)
        self._age[at], self._oldest[at] = one.age, one.oldest
        self._shared[at], self._seen[at], self._stored[at], self._begun[at] = one.shared, one.seen, 0, -1
        one.enter(self, self.packed[at], self._seen[at[0], at[1] : at[1] + 1])

    def leave(self, one: SequenceState) -> None:
        """Gives the state back to a sequence that is about to lose its slot."""
        at = one.request.replica, one.slot
        one.leave()
        self.packed[at] = self._blank[at]
        self._age[at], self.placed[at] = _FREE, False

    def map(self, one: SequenceState) -> None:
        row = self.packed[one.request.replica, one.slot]
        row[c.TABLE : c.TABLE + len(one.pages)] = one.pages
        row[c.MAPPED] = len(one.pages) * self._sizes.page_size

    def oldest(self, sequence: SequenceState) -> int:
        return int(self._oldest[sequence.request.replica, sequence.slot])

    def last_token(self, sequence: SequenceState) -> int:
        at = sequence.request.replica, sequence.slot
        late = self._late
        if late is not None and late.new[at]:
            return int(late.out[at][c.OUT_WINDOW + late.new[at] - 1])
        return int(self._words[(*at, self._stored[at] - 1, _TOKEN)])

    def column(self, sequence: SequenceState, name: str) -> Any:
        at = sequence.request.replica, sequence.slot
        self._store_one(at)
        return self._column(at, name)

    def gather(self, sequence: SequenceState) -> dict[str, Any]:
        """Returns what was settled in the slot by name, and forgets it."""
        at = sequence.request.replica, sequence.slot
        self._store_one(at)
        out = {name: self._column(at, name) for name in (*_KINDS, "drafted", "clocks", "sampled", "kept")}
        self._stored[at] = 0
        return out

    def _column(self, at: tuple[int, int], name: str) -> Any:
        words = self._words[at][: self._stored[at]]
        if name == "kept":
            sizes = self._sizes
            return Ragged.of_rows(words[:, _KEPT:], sizes.route_words) if sizes.record else Ragged.empty(len(words))
        if name == "sampled":
            return np.ones(len(words), bool)
        if name == "drafted":
            return words[:, _STAMP] % 2 == 1
        if name == "clocks":
            return self._begun[at] + words[:, _STAMP] // 2
        word, kind = _KINDS[name]
        return words[:, word].copy().view(kind)

    # ---- a dispatch

    def mask(self, purpose: str) -> np.ndarray:
        """Returns which slots hold a sequence of this purpose, bool[replicas, S]."""
        return (self._age != _FREE) & (self._purpose == PURPOSES.index(purpose))

    def view(self, live: np.ndarray) -> np.ndarray:
        """Returns the matrix of a dispatch in which the slots of `live` run: a copy, with the order of all slots."""
        packed = self.packed.copy()
        others = (self._age != _FREE) & ~live
        if others.any():
            packed[others] = self._blank[others]
        packed[..., c.ORDER] = self.order()
        return packed

    def order(self) -> np.ndarray:
        """Returns each replica's slots, the slot of the oldest sequence first and free slots last, by number."""
        return np.argsort(self._age, axis=1, kind="stable")

    def computed(self, replica: int, slot: int) -> bool:
        """Returns whether the shared positions of the slot's prompt are in the cache."""
        return bool(self.packed[replica, slot, c.NUM_COMPUTED] >= self._shared[replica, slot])

    def passed(self, replica: int, slot: int) -> bool:
        """Returns whether positions behind those of the slot's prompt that are shared are in the cache."""
        return bool(self.packed[replica, slot, c.NUM_COMPUTED] > self._shared[replica, slot])

    def short_of_pages(self, live: np.ndarray, growth: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Returns (replica, slot, number of pages) of the slots that lack pages for `growth` more positions, by replica
        and age."""
        packed, page = self.packed, self._sizes.page_size
        positions = np.minimum(packed[..., c.NUM_TOKENS] + growth, packed[..., c.LIMIT] - 1)
        lacking = np.where(live, -(-positions // page) - packed[..., c.MAPPED] // page, 0)
        replicas, slots = np.nonzero(lacking > 0)
        by_age = np.lexsort((self._age[replicas, slots], replicas))
        replicas, slots = replicas[by_age], slots[by_age]
        return replicas, slots, lacking[replicas, slots]

    def map_all(self, replicas: np.ndarray, slots: np.ndarray, counts: np.ndarray, ids: Sequence[int]) -> None:
        """Writes pages into the rows of several slots: as many of `ids` to each as `counts` says, in order."""
        begin = c.TABLE + self.packed[replicas, slots, c.MAPPED] // self._sizes.page_size
        within = np.arange(len(ids)) - np.repeat(np.cumsum(counts) - counts, counts)
        rows = np.repeat(replicas, counts), np.repeat(slots, counts)
        self.packed[(*rows, np.repeat(begin, counts) + within)] = ids
        self.packed[replicas, slots, c.MAPPED] += counts * self._sizes.page_size

    def settle(
        self, live: np.ndarray, out: np.ndarray, clock: int, version: int, drafts: bool
    ) -> list[tuple[int, int, int]]:
        """Takes over what a dispatch settled, but for slots with candidates.

        Returns: (replica, slot, tokens before) of slots that may have ended, that have candidates or that stop at
        strings, by replica and age."""
        self.store()
        packed = self.packed
        guesses = live & (packed[..., c.CANDIDATE_END] > packed[..., c.NUM_TOKENS])
        plain = live & ~guesses
        before = packed[..., c.NUM_TOKENS].copy()
        new = np.where(plain, out[..., c.OUT_NUM_TOKENS] - before, 0)
        packed[..., c.NUM_TOKENS] += new
        np.copyto(packed[..., c.CANDIDATE_END], packed[..., c.NUM_TOKENS], where=plain)
        np.copyto(packed[..., c.NUM_COMPUTED], out[..., c.OUT_NUM_COMPUTED], where=live)
        np.copyto(self._oldest, np.minimum(self._oldest, version), where=live & (out[..., c.OUT_NUM_TOKENS] > before))
        np.copyto(self._begun, clock, where=(new > 0) & (self._stored == 0))
        if drafts:
            np.copyto(self._seen, packed[..., c.NUM_TOKENS], where=plain)
        last = np.take_along_axis(out, (c.OUT_WINDOW + np.maximum(new, 1) - 1)[..., None], axis=-1)
        ended = np.any(last == packed[..., c.FIRST_END : c.TABLE], axis=-1) | self._stops
        ended = (ended & (new > 0)) | (plain & (packed[..., c.NUM_TOKENS] >= packed[..., c.LIMIT]))
        self._late = _Late(new, out, clock, version)
        replicas, slots = np.nonzero(ended | guesses)
        found = np.lexsort((self._age[replicas, slots], replicas))
        return [(d, s, n) for d, s, n in zip(*(x[found].tolist() for x in (replicas, slots, before[replicas, slots])))]

    # ---- new tokens

    def store(self) -> None:
        """Stores the new tokens of all slots. It may wait until the next dispatch runs.

        Equally many words are written to each slot, as that is fastest. The next ones replace those without a token."""
        late, self._late = self._late, None
        if late is None or not late.new.any():
            return
        most, blocks, width = int(late.new.max()), self._blocks(late.out), self._words.shape[-1]
        words = np.empty((*late.new.shape, most, width), np.int32)
        for word in range(c.BLOCKS):
            words[..., word] = blocks[:, :, word, :most]
        words[..., _KEPT:] = np.moveaxis(blocks[:, :, c.BLOCKS :, :most], 2, 3)
        words[..., _STAMP] += self._shift(late)[..., None]
        words[..., _VERSION] = late.version
        places = np.lib.stride_tricks.sliding_window_view(self._words.reshape(-1), most * width, writeable=True)[
            ::width
        ]
        first = self._words.shape[2] * np.arange(late.new.size) + self._stored.reshape(-1)
        places[first] = words.reshape(late.new.size, -1)
        self._stored += late.new

    def _store_one(self, at: tuple[int, int]) -> None:
        late = self._late
        if late is None or not late.new[at]:
            return
        count, begin = int(late.new[at]), int(self._stored[at])
        words = self._words[at][begin : begin + count]
        blocks = self._blocks(late.out)[at][:, :count].T
        words[:, : c.BLOCKS], words[:, _KEPT:] = blocks[:, : c.BLOCKS], blocks[:, c.BLOCKS :]
        words[:, _STAMP] += self._shift(late)[at]
        words[:, _VERSION] = late.version
        self._stored[at] += count
        late.new[at] = 0

    def _shift(self, late: _Late) -> np.ndarray:
        """Returns what a stamp of each slot is raised by. Clocks count from the slot's first dispatch, so that they fit."""
        return (2 * (late.clock + 1 - self._begun)).astype(np.int32)

    def _blocks(self, out: np.ndarray) -> np.ndarray:
        """Returns the blocks of new tokens, [replicas, S, BLOCKS + record, emit], without a copy."""
        return out[..., c.OUT_WINDOW :].reshape(*out.shape[:2], c.BLOCKS + self._sizes.record, -1)
