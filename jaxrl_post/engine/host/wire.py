"""The wire format between the host and a row device: columns of the packed matrices, and the arrays beside them.

Invariant: everything here is a plain number or a named tuple of arrays, of numpy or of jax. The host and every device
read the same columns.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from jaxrl_post.ring.types import MOST_ENDS

# Columns of `place`, the drafter's table for a slot. OFFSET, SIZE: the table of the slot's prompt (size 0: none).
# ALL_OFFSET, ALL_SIZE: the table over all prompts. ROW: row of the live table; rollouts of one prompt share a row.
OFFSET, SIZE, ALL_OFFSET, ALL_SIZE, ROW, PLACE = range(6)
# Columns of the packed host-to-device matrix. MOST_ENDS end ids follow at FIRST_END, then the page table at TABLE.
(ACTIVE, NUM_TOKENS, NUM_COMPUTED, CANDIDATE_END, LIMIT, MAPPED, ORDER, WATCH, *LAW, LEADER, BRANCH, WEIGHT, DRAFTS) = (
    range(17)
)
SEED0, SEED1, TEMPERATURE, TOP_K, TOP_P = LAW
FIRST_END = DRAFTS + PLACE
TABLE = FIRST_END + MOST_ENDS
# Columns of the packed device-to-host matrix. Blocks of `emit` columns follow at OUT_WINDOW: tokens, log-probs, entropies,
# stamps (step * 2 + drafted), argmax tokens, then `record` blocks with the ids and words of each token's record.
BLOCKS = 5  # without the record
OUT_NUM_TOKENS, OUT_NUM_COMPUTED, OUT_CANDIDATE_END, OUT_DONE, OUT_WINDOW = range(5)
AUTO, LIBRARY, FIXED, PARTS = "auto", "library", "fixed", "parts"  # EngineSettings.products
VERSIONS = {
    FIXED: 1,
    PARTS: 1,
}  # rises where such products get other bits: another order of a sum, or another shape of its parts
LEAST_TILE, TILE_STEP = 64, 32  # head rows of a tile: compilers take other paths for few rows, and for odd numbers
USES = ("prefill", "decode", "draft_accepted", "draft_rejected", "idle", "clone")
OFFERS = 16  # bins of equal width, by estimated chance, in which offered drafts are counted
PROMPT_TILE = 64  # rows of a tile of the wide prompt program; one tile computes positions of one prompt
# Columns of a tile: its slot, its first position, and its number of positions. The slot's page table follows.
TILE_SLOT, TILE_FIRST, TILE_COUNT, TILE_TABLE = range(4)
UPLOAD = 1024  # entries of a drafter's tables in a small upload
BULK = 64 * UPLOAD  # entries in a large upload
# Rows of a slot in a step that may be taken back, where layers have a recurrent state. Each takes memory in all of these layers.
STATE_ROWS = 8


@dataclass(frozen=True, kw_only=True)
class EngineSettings:
    """What a row engine is compiled for; all sizes are per replica.

    `max_length`: positions of a slot. `pages`: pages of `page_size` positions. `row_sizes`: rows of a step that are
    compiled. `head_rows`: rows that can sample. `refill_slots`: finished slots that end a dispatch while requests wait.
    `restricted`: whether requests may have top-k and top-p. `dtype`: of activations and KV cache. `prompt_rows`: rows
    of a pass of the wide prompt program; 0: the row program computes prompts. `scoring`: a request's prefix is not
    verified but scored: all of its tokens stay, with the log-probs of these weights. `shards`: the devices that the
    vocabulary is split over (kernels.verify.Shards), or None for one device. `kept_ids`: the most ids that top-k and top-p
    leave of a token that is recorded; 0 records none. `route_words`: the words of its route through the experts, behind
    them; 0 records none. `recurrent`: layers have a recurrent state, which lies in a slot and not in pages; the engine
    sets it by its model. `verifies`: tokens may be proposed. Without it, recurrent layers keep no rows that may be rejected.
    Candidates then get no rows of their own there. `weights`, `kv`: the formats of matrices and of keys and values
    (kernels/eight_bits.py); "auto": they have `dtype`. `one_graph`: a GPU runs a whole dispatch as one graph. `products`: "auto",
    "library", "fixed" (kernels/row_blocks.py) or "parts" (kernels/rows_gpu.py), which the engine sets in the place of "auto"."""

    replicas: int = 1
    slots: int
    max_length: int
    page_size: int
    pages: int
    row_sizes: Sequence[int]
    head_rows: int
    steps_per_dispatch: int
    refill_slots: int = 1
    restricted: bool = False
    dtype: Any = np.float32
    prompt_rows: int = 0
    scoring: bool = False
    shards: Any = None
    kept_ids: int = 0
    route_words: int = 0
    recurrent: bool = False
    verifies: bool = True
    weights: str = "auto"
    kv: str = "auto"
    one_graph: bool = False
    products: str = AUTO

    @property
    def products_key(self) -> str:
        """Returns what the bits of products depend on beside shapes: their name, and of ours the version."""
        version = VERSIONS.get(self.products)
        return LIBRARY if version is None else f"{self.products} {version}"

    @property
    def record(self) -> int:
        """Returns the most ids and words of a token's record."""
        return self.kept_ids + self.route_words

    @property
    def emit(self) -> int:
        """Returns the most tokens that one slot may get in one dispatch."""
        return most_new(self.max_length, self.steps_per_dispatch)

    @property
    def state_rows(self) -> int:
        """Returns the most drafted rows that one slot has in a step, where layers have a recurrent state."""
        verifies = self.verifies or self.scoring
        return state_rows(self.max_length, self.steps_per_dispatch, self.head_rows, verifies=verifies)

    @property
    def inserts(self) -> int:
        """Returns the texts that enter slots of a replica at once."""
        return min(self.slots, 16)

    @property
    def blocks(self) -> int:
        """Returns the length of a slot's page table."""
        return -(-self.max_length // self.page_size)

    def head_tile(self, rows: int) -> int:
        """Returns the number of head rows in a tile. A step computes logits and draws tokens one tile at a time.

        Sums round differently in a tile of another size. So the size follows from slots and `rows` (the rows of the
        step) alone. It must not follow from the number of head rows, which depends on the drafter.
        """
        least = max(LEAST_TILE, -(-self.slots // TILE_STEP) * TILE_STEP)
        return rows if rows <= LEAST_TILE else least

    def head_places(self, rows: int) -> int:
        """Returns the number of rows that may sample in a step of `rows` rows, in whole tiles."""
        tile = self.head_tile(rows)
        return -(-min(self.head_rows, rows) // tile) * tile


def state_rows(max_length: int, steps: int, head_rows: int, *, verifies: bool) -> int:
    """Returns EngineSettings.state_rows. verifies: tokens may be proposed, or are scored."""
    return min(STATE_ROWS, most_new(max_length, steps) - 1, head_rows - 1) if verifies else 0


def most_new(max_length: int, steps_per_dispatch: int) -> int:
    """Returns the most tokens that one slot may get in one dispatch."""
    return min(max_length, max(4 * steps_per_dispatch, 16))


class DispatchResult(NamedTuple):
    """What the host reads after a dispatch.

    out: [replicas, S, OUT_WINDOW + (BLOCKS + record) * emit]. uses: rows by use, [replicas, len(USES)]. steps: number of device steps.
    offers: offered drafts by estimated chance, [replicas, OFFERS]. won: tokens taken over from clones, [replicas].
    counts: judged and right drafts of each class, [replicas, 2, classes]."""

    out: Any
    uses: Any
    steps: Any
    offers: Any
    won: Any
    counts: Any


class Entry(NamedTuple):
    """Texts that enter slots, and what to copy; every array is [replicas, I] or [replicas, I, T].

    slot: a slot >= S is dropped. source, target: pages of a copy; a target >= pages is dropped. state: the slot whose recurrent
    state is copied. tokens: [replicas, I,
    T], the first `num_tokens` of them settled. argmax_tokens: the likeliest token at each position; T = 0 without a
    drafter. row, fresh: row of the drafter's live table, and whether to empty it. seen: tokens that the row has learned
    already; read only where `fresh` is 0."""

    slot: Any
    source: Any
    target: Any
    state: Any
    tokens: Any
    argmax_tokens: Any
    num_tokens: Any
    row: Any
    fresh: Any
    seen: Any

    @classmethod
    def blank(cls, sizes: EngineSettings, watched: int) -> Entry:
        """Returns an entry that changes nothing, with argmax tokens of `watched` positions. `joined` does not copy it."""
        shape = (sizes.replicas, sizes.inserts, len(_NUMBERS) + sizes.max_length + watched)
        entry = cls.parted(np.zeros(shape, np.int32), sizes.max_length)
        entry.slot[:] = sizes.slots
        entry.source[:] = entry.target[:] = sizes.pages
        return entry

    def joined(self) -> np.ndarray:
        """Joins all arrays to one int32 array [replicas, I, 8 + T + T'], so that one transfer replaces ten."""
        whole = self.tokens.base
        if isinstance(whole, np.ndarray) and _same(self, Entry.parted(whole, self.tokens.shape[-1])):
            return whole
        texts = (self.tokens, self.argmax_tokens)
        return np.concatenate([np.stack([getattr(self, name) for name in _NUMBERS], axis=-1), *texts], axis=-1)

    @classmethod
    def parted(cls, joined: Any, length: int) -> Entry:
        """Splits a joined array into an Entry whose `tokens` have `length` columns."""
        many = len(_NUMBERS)
        return cls(
            **{name: joined[..., i] for i, name in enumerate(_NUMBERS)},
            tokens=joined[..., many : many + length],
            argmax_tokens=joined[..., many + length :],
        )


def _same(one: Entry, other: Entry) -> bool:
    """Returns whether both entries lie in the same memory."""
    pairs = [(a.__array_interface__, b.__array_interface__) for a, b in zip(one, other)]
    return all(a["data"] == b["data"] and a["shape"] == b["shape"] for a, b in pairs)


_NUMBERS = tuple(name for name in Entry._fields if name not in ("tokens", "argmax_tokens"))
