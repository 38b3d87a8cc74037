"""How requests become the rows of the packed matrix and the entries of an insertion.

Invariant: what a slot is told about its answer's law (seed, temperature, ends) is the request's alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import numpy as np

from jaxrl_post.engine.host import wire as c
from jaxrl_post.engine.host.replica import Replica
from jaxrl_post.engine.host.sequence import Live, Settled


def blank(sizes: c.Sizes) -> np.ndarray:
    """int32[replicas, S, columns] in which no slot is active."""
    packed = np.zeros((sizes.replicas, sizes.slots, c.TABLE + sizes.blocks), np.int32)
    packed[..., c.TABLE :] = sizes.pages
    packed[..., c.FIRST_END : c.TABLE] = -1
    packed[..., c.LEADER] = np.arange(sizes.slots)
    packed[..., c.WEIGHT] = np.float32(1).view(np.int32)
    return packed


def order(replica: Replica) -> list[int]:
    """Its slots, the oldest answer's first, empty ones last."""
    return [live.slot for live in replica.running] + [i for i, live in enumerate(replica.slots) if live is None]


def describe(live: Live, row: np.ndarray, replica: Replica, watched: bool) -> None:
    """Fills the slot's row. `watched`: a free slot could be given to a sibling as soon as the prompt is computed."""
    sampling = live.request.sampling
    row[c.ACTIVE] = 1
    row[c.KNOWN], row[c.FILLED] = live.known, live.filled
    row[c.GUESSED] = live.known + len(live.guesses)
    row[c.LIMIT] = live.limit
    row[c.MAPPED] = len(live.pages) * replica.pages.size
    row[c.WATCH] = live.shared if watched and replica.leads(live) else 0
    row[c.SEED0 : c.SEED1 + 1] = live.request.seed.view(np.int32)
    row[c.TEMPERATURE] = np.float32(sampling.temperature).view(np.int32)
    row[c.LEADER] = live.slot
    row[c.TOP_K], row[c.TOP_P] = sampling.top_k, np.float32(sampling.top_p).view(np.int32)
    ends = sampling.eos_ids + sampling.stop_ids
    row[c.FIRST_END : c.FIRST_END + len(ends)] = ends
    row[c.TABLE : c.TABLE + len(live.pages)] = live.pages


def describe_drafts(packed: np.ndarray, live: Live, weight: np.float32) -> None:
    """Where the slot's drafts come from, and what they count beside others'."""
    row = packed[live.request.replica, live.slot]
    row[c.DRAFTS : c.FIRST_END], row[c.WEIGHT] = live.place, weight.view(np.int32)


def clones(
    replica: Replica, lives: Sequence[Live], packed: np.ndarray, size: int, count: Callable[[float, int, int], int]
) -> Iterator[tuple[Live, int, int, list[int]]]:
    """Describes clones in one replica's packed [S, columns]: (answer, slot, pages it shares, own ones), as many as `count`
    makes of the rows that `lives` leave of `size`, the answers that may be cloned and the free slots."""
    mine = [live for live in lives if live.filled == live.known - 1 and not live.guesses]
    free = [i for i, live in enumerate(replica.slots) if live is None]
    for number, slot in enumerate(free[: count(size - len(lives), len(mine), len(free))]):
        live = mine[-1 - number % len(mine)]
        whole = live.filled // replica.pages.size
        own = replica.pages.take(len(live.pages) - whole)
        if own is None:
            return
        describe_clone(packed, live, slot, 1 + number // len(mine), whole, own)
        yield live, slot, whole, own


def describe_clone(packed: np.ndarray, leader: Live, slot: int, branch: int, whole: int, own: Sequence[int]) -> None:
    """One replica's packed [S, columns]: `slot` stands in for the leader's, trying its `branch`-th drafts, on the leader's
    first `whole` pages and `own` ones behind them."""
    row = packed[slot]
    place_in_order = row[c.ORDER]
    row[:] = packed[leader.slot]
    row[c.ORDER] = place_in_order
    row[c.WATCH], row[c.LEADER], row[c.BRANCH] = 0, leader.slot, branch
    row[c.TABLE + whole : c.TABLE + len(leader.pages)] = own


def settled(out: np.ndarray, packed: np.ndarray, clock: int) -> list[list[Settled]]:
    """Of every replica's slots what a dispatch that began at `clock` told of them (`out`, see columns.Told) beyond what
    `packed` gave; all at once, since one slot after the other would take longer than a small model's step."""
    new = out[..., c.OUT_KNOWN] - packed[..., c.KNOWN]
    blocks = out[..., c.OUT_WINDOW :].reshape(*out.shape[:2], 5, -1)[..., : max(int(new.max()), 0)]
    tokens, logprobs, entropies, stamps, favourites = (blocks[:, :, i] for i in range(5))
    clocks = clock + 1 + stamps.astype(np.int64) // 2
    told = (tokens, logprobs.view(np.float32), entropies.view(np.float32), stamps % 2 == 1, clocks, favourites)
    lists = [column.tolist() for column in told]
    return [
        [
            Settled(filled, *(column[replica][slot][:count] for column in lists))
            for slot, (filled, count) in enumerate(zip(*ends))
        ]
        for replica, ends in enumerate(zip(out[..., c.OUT_FILLED].tolist(), new.tolist()))
    ]


def entries(
    sizes: c.Sizes, watched: int, given: Sequence[tuple[Live, int, int]], slots: Sequence[int]
) -> Iterator[c.Entry]:
    """Insertions of at most `sizes.inserts` a replica for (answer, page to copy from, page to copy to), each into its place
    in `slots`; favourites of the first `watched` positions. A text that has a place counts as seen by the drafter from
    then on."""
    by_replica = [
        [(*g, slot) for g, slot in zip(given, slots) if g[0].request.replica == d] for d in range(sizes.replicas)
    ]
    for begin_at in range(0, max(map(len, by_replica)), sizes.inserts):
        shape = (sizes.replicas, sizes.inserts)
        entry = c.Entry(
            slot=np.full(shape, sizes.slots, np.int32),
            source=np.full(shape, sizes.pages, np.int32),
            target=np.full(shape, sizes.pages, np.int32),
            tokens=np.zeros((*shape, sizes.max_length), np.int32),
            favourites=np.zeros((*shape, watched), np.int32),
            **{name: np.zeros(shape, np.int32) for name in ("known", "row", "fresh", "seen")},
        )
        for d, mine in enumerate(by_replica):
            for i, (live, copy_from, copy_to, at) in enumerate(mine[begin_at : begin_at + sizes.inserts]):
                text = live.text()[: sizes.max_length]
                entry.slot[d, i], entry.source[d, i], entry.target[d, i] = at, copy_from, copy_to
                entry.tokens[d, i, : text.size], entry.known[d, i] = text, live.known
                entry.favourites[d, i, : live.known] = live.learnable()[:watched]
                entry.seen[d, i] = live.known
                if live.place is not None:
                    entry.row[d, i], entry.fresh[d, i], entry.seen[d, i] = live.place[c.ROW], live.seen == 0, live.seen
                    live.seen = live.known
        yield entry
