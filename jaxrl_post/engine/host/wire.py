"""What passes between the host and a device of rows: the columns of the packed matrices, and the arrays around them.

Invariant: plain numbers and named tuples of arrays, whichever library made them; the host's side and every device read the
same columns.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from jaxrl_post.types import MOST_ENDS

# columns of `place`: where the slot's prompt has its table (size 0: nowhere), where that of all prompts lies, and the row of
# the live table, which the answers to a prompt share
OFFSET, SIZE, ALL_OFFSET, ALL_SIZE, ROW, PLACE = range(6)
# columns of the packed host-to-device matrix, then MOST_ENDS ids, then the page table
ACTIVE, KNOWN, FILLED, GUESSED, LIMIT, MAPPED, ORDER, WATCH, *LAW, LEADER, BRANCH, WEIGHT, DRAFTS = range(17)
SEED0, SEED1, TEMPERATURE, TOP_K, TOP_P = LAW
FIRST_END = DRAFTS + PLACE
TABLE = FIRST_END + MOST_ENDS
# columns of the packed device-to-host matrix, then five blocks of `emit`: tokens, log-probs, entropies,
# step*2+drafted, favourites
OUT_KNOWN, OUT_FILLED, OUT_GUESSED, OUT_DONE, OUT_WINDOW = range(5)
LEAST_TILE, TILE_STEP = 64, 32  # head rows of a tile: compilers take other paths for few rows, and for odd numbers
USES = ("prefill", "decode", "draft_accepted", "draft_rejected", "idle", "clone")
UPLOAD = 1024  # entries of a drafter's tables that go to the device at once
BULK = 64 * UPLOAD  # entries of a larger piece, where there are as many
OFFERS = 16  # ranges of estimated chance, by which drafts that were offered are counted


@dataclass(frozen=True)
class Sizes:
    """What a device of rows is built for, one replica's. `emit`: tokens one slot may get in one dispatch. `restricted`: rows
    may have top-k and top-p. `shards`: over which devices a vocabulary lies, if there are several (kernels.verify.Shards)."""

    replicas: int
    slots: int
    max_length: int
    page: int
    pages: int
    heads: int
    steps: int
    emit: int
    inserts: int
    restricted: bool
    shards: Any = None

    @classmethod
    def of(
        cls,
        replicas: int,
        *,
        slots: int,
        max_length: int,
        page_size: int,
        pages: int,
        head_rows: int,
        steps_per_dispatch: int,
        restricted: bool = False,
    ) -> Sizes:
        """Those of an engine's settings."""
        return cls(
            replicas=replicas,
            slots=slots,
            max_length=max_length,
            page=page_size,
            pages=pages,
            heads=head_rows,
            steps=steps_per_dispatch,
            emit=min(max_length, max(4 * steps_per_dispatch, 16)),
            inserts=min(slots, 16),
            restricted=restricted,
        )

    @property
    def blocks(self) -> int:
        return -(-self.max_length // self.page)

    def head_tile(self, rows: int) -> int:
        """Returns for how many head rows at once a step of `rows` rows computes logits and draws tokens.

        Sums round differently in a tile of another size. The size follows from slots and rows alone. The number of head
        rows depends on the drafter, so it must not decide the size.
        """
        least = max(LEAST_TILE, -(-self.slots // TILE_STEP) * TILE_STEP)
        return rows if rows <= LEAST_TILE else least

    def head_places(self, rows: int) -> int:
        """Returns the number of rows that may sample in a step of `rows` rows, in whole tiles."""
        tile = self.head_tile(rows)
        return -(-min(self.heads, rows) // tile) * tile


class Told(NamedTuple):
    """What the host reads after a dispatch: `out` [replicas, S, OUT_WINDOW + 5 * emit], `uses` [replicas, len(USES)], the
    steps taken, `offers` [replicas, OFFERS], `won` [replicas], and the drafter's counts [replicas, 2, classes]."""

    out: Any
    uses: Any
    steps: Any
    offers: Any
    won: Any
    counts: Any


class Entry(NamedTuple):
    """Texts that take slots, [replicas, I]: a slot >= S or a target >= pages is dropped. `tokens` [replicas, I, T] with
    `known` settled ones, and `favourites` like them (T = 0 where nothing drafts); `row` and `fresh`: of the
    drafter's live table, which knows the first `seen` tokens where not fresh."""

    slot: Any
    source: Any
    target: Any
    tokens: Any
    favourites: Any
    known: Any
    row: Any
    fresh: Any
    seen: Any

    def joined(self) -> np.ndarray:
        """All of it as one int32 array [replicas, I, 7 + T + T']: one transfer instead of nine."""
        texts = (self.tokens, self.favourites)
        return np.concatenate([np.stack([getattr(self, name) for name in _NUMBERS], axis=-1), *texts], axis=-1)

    @classmethod
    def parted(cls, joined: Any, length: int) -> Entry:
        """The entry that was joined, with texts of `length` tokens."""
        many = len(_NUMBERS)
        return cls(
            **{name: joined[..., i] for i, name in enumerate(_NUMBERS)},
            tokens=joined[..., many : many + length],
            favourites=joined[..., many + length :],
        )


_NUMBERS = tuple(name for name in Entry._fields if name not in ("tokens", "favourites"))
