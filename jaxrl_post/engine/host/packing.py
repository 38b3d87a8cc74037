"""How sequences become rows of the packed matrix, entries of an insertion and tiles of the wide prompt program, and how a
result becomes settled tokens.

A tile holds PROMPT_TILE positions of one prompt, from a multiple of PROMPT_TILE on. A pass computes the same number of tiles
for every replica. A prompt's tiles follow each other, in one pass or in several.

Invariant: the columns of the sampling law (seed, temperature, cuts, end ids) come from the request alone. The tiles of a
prompt follow from its length alone. The pass and the place of a tile depend on other prompts, and change no bit.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import numpy as np

from jaxrl_post.engine.host import wire as c
from jaxrl_post.engine.host.device import RowDevice
from jaxrl_post.engine.host.replica import Copy, Replica
from jaxrl_post.engine.host.sequence import SequenceState, Settled
from jaxrl_post.ring.ragged import Ragged

_PREFILL, _IDLE = c.USES.index("prefill"), c.USES.index("idle")


def blank(sizes: c.EngineSettings) -> np.ndarray:
    """Returns the packed matrix int32[replicas, S, columns] with every slot inactive."""
    packed = np.zeros((sizes.replicas, sizes.slots, c.TABLE + sizes.blocks), np.int32)
    packed[..., c.TABLE :] = sizes.pages
    packed[..., c.FIRST_END : c.TABLE] = -1
    packed[..., c.LEADER] = np.arange(sizes.slots)
    packed[..., c.WEIGHT] = np.float32(1).view(np.int32)
    return packed


def describe(sequence: SequenceState, row: np.ndarray, replica: Replica, watched: bool) -> None:
    """Fills the sequence's row of the packed matrix.

    `watched`: the dispatch ends as soon as this slot has computed its prompt, because others wait for the prompt."""
    sampling = sequence.request.sampling
    row[c.ACTIVE] = 1
    row[c.NUM_TOKENS], row[c.NUM_COMPUTED] = sequence.num_tokens, sequence.num_computed
    row[c.CANDIDATE_END] = sequence.num_tokens + len(sequence.candidates)
    row[c.LIMIT] = sequence.limit
    row[c.MAPPED] = len(sequence.pages) * replica.pages.size
    row[c.WATCH] = sequence.shared if watched and replica.leads(sequence) else 0
    row[c.SEED0 : c.SEED1 + 1] = sequence.request.seed.view(np.int32)
    row[c.TEMPERATURE] = np.float32(sampling.temperature).view(np.int32)
    row[c.LEADER] = sequence.slot
    row[c.TOP_K], row[c.TOP_P] = sampling.top_k, np.float32(sampling.top_p).view(np.int32)
    ends = sampling.eos_ids + sampling.stop_ids
    row[c.FIRST_END : c.FIRST_END + len(ends)] = ends
    row[c.TABLE : c.TABLE + len(sequence.pages)] = sequence.pages


def describe_drafts(packed: np.ndarray, sequence: SequenceState, weight: np.float32) -> None:
    """Fills the drafter's columns of the sequence's row: where its tables are, and how much its drafts count."""
    row = packed[sequence.request.replica, sequence.slot]
    row[c.DRAFTS : c.FIRST_END], row[c.WEIGHT] = sequence.place, weight.view(np.int32)


def clones(
    replica: Replica,
    sequences: Sequence[SequenceState],
    packed: np.ndarray,
    size: int,
    count: Callable[[float, int, int], int],
) -> Iterator[tuple[SequenceState, int, int, list[int]]]:
    """Describes clones in one replica's packed matrix [S, columns], while pages are free.

    A sequence can be cloned when it only decodes and has no candidates. `count(rows, sequences, slots)` gives the
    number of clones, from the rows that `sequences` leave of `size`, the sequences to clone and the free slots.

    Yields: (sequence, slot of the clone, number of shared pages, the clone's own pages)."""
    mine = [one for one in sequences if one.num_computed == one.num_tokens - 1 and not one.candidates]
    free = [i for i, one in enumerate(replica.slots) if one is None]
    for number, slot in enumerate(free[: count(size - len(sequences), len(mine), len(free))]):
        sequence = mine[-1 - number % len(mine)]
        whole = sequence.num_computed // replica.pages.size
        own = replica.pages.take(len(sequence.pages) - whole)
        if own is None:
            return
        describe_clone(packed, sequence, slot, 1 + number // len(mine), whole, own)
        yield sequence, slot, whole, own


def describe_clone(
    packed: np.ndarray, leader: SequenceState, slot: int, branch: int, whole: int, own: Sequence[int]
) -> None:
    """Fills the row of a clone in one replica's packed matrix [S, columns].

    The clone tries the leader's drafts of number `branch`. It reads the leader's first `whole` pages, then pages `own`.
    """
    row = packed[slot]
    place_in_order = row[c.ORDER]
    row[:] = packed[leader.slot]
    row[c.ORDER] = place_in_order
    row[c.WATCH], row[c.LEADER], row[c.BRANCH] = 0, leader.slot, branch
    row[c.TABLE + whole : c.TABLE + len(leader.pages)] = own


def settled(out: np.ndarray, before: int, clock: int, record: int = 0, route_words: int = 0) -> Settled:
    """Returns the tokens that a dispatch settled in one slot.

    `out` is the slot's row of wire.DispatchResult.out, `before` its number of tokens in the dispatch's input, `clock`
    the clock at its first step, and `record` and `route_words` those of EngineSettings."""
    new = int(out[c.OUT_NUM_TOKENS]) - before
    blocks = out[c.OUT_WINDOW :].reshape(c.BLOCKS + record, -1)[:, :new]
    tokens, logprobs, entropies, stamps, argmax_tokens = blocks[: c.BLOCKS]
    clocks = clock + 1 + stamps.astype(np.int64) // 2
    floats = (block.view(np.float32) for block in (logprobs, entropies))
    columns = (tokens, *floats, stamps % 2 == 1, clocks, argmax_tokens)
    kept = Ragged.of_rows(blocks[c.BLOCKS :].T, route_words) if record else None
    return Settled(int(out[c.OUT_NUM_COMPUTED]), *(column.tolist() for column in columns))._replace(kept=kept)


def entries(
    sizes: c.EngineSettings, watched: int, given: Sequence[tuple[SequenceState, Copy]], slots: Sequence[int]
) -> Iterator[c.Entry]:
    """Yields insertions of at most `sizes.inserts` texts a replica, each text into its slot of `slots`.

    `given`: what each sequence takes from another one. Argmax tokens are sent for the first `watched`
    positions. A text with a place in the drafter's tables counts as learned from then on."""
    by_replica = [
        [(*g, slot) for g, slot in zip(given, slots) if g[0].request.replica == d] for d in range(sizes.replicas)
    ]
    for begin_at in range(0, max(map(len, by_replica)), sizes.inserts):
        entry = c.Entry.blank(sizes, watched)
        for d, mine in enumerate(by_replica):
            for i, (sequence, copy, at) in enumerate(mine[begin_at : begin_at + sizes.inserts]):
                text, length = sequence.text()[: sizes.max_length], sequence.num_tokens
                entry.slot[d, i], entry.source[d, i], entry.target[d, i], entry.state[d, i] = at, *copy
                entry.tokens[d, i, : text.size], entry.num_tokens[d, i] = text, length
                if watched:
                    entry.argmax_tokens[d, i, :length] = sequence.learnable()[:watched]
                entry.seen[d, i] = length
                if sequence.place is not None:
                    entry.row[d, i], entry.fresh[d, i] = sequence.place[c.ROW], sequence.seen == 0
                    entry.seen[d, i], sequence.seen = sequence.seen, length
        yield entry


def tiles(sequence: SequenceState) -> Iterator[tuple[int, int, int]]:
    """Yields (slot, first position, number of positions) of the tiles of a prompt.

    The last position has no place here: its row samples, so the row program computes it."""
    for first in range(0, sequence.shared, c.PROMPT_TILE):
        yield sequence.slot, first, min(c.PROMPT_TILE, sequence.shared - first)


def passes(sizes: c.EngineSettings, sequences: Sequence[SequenceState]) -> Iterator[np.ndarray]:
    """Yields int32[replicas, tiles, columns], the tiles of each pass, until all these prompts are computed.

    An empty tile has no positions."""
    ordered = [
        [(sequence, tile) for sequence in sequences if sequence.request.replica == d for tile in tiles(sequence)]
        for d in range(sizes.replicas)
    ]
    count = sizes.prompt_rows // c.PROMPT_TILE
    for begin in range(0, max(map(len, ordered)), count):
        out = np.zeros((sizes.replicas, count, c.TILE_TABLE + sizes.blocks), np.int32)
        out[..., c.TILE_TABLE :] = sizes.pages
        for d, mine in enumerate(ordered):
            for row, (sequence, tile) in zip(out[d], mine[begin : begin + count]):
                row[: c.TILE_TABLE] = tile
                row[c.TILE_TABLE : c.TILE_TABLE + len(sequence.pages)] = sequence.pages
        yield out


def compute(device: RowDevice, sizes: c.EngineSettings, sequences: Sequence[SequenceState]) -> c.DispatchResult:
    """Computes the shared positions of these prompts on the device. Returns the passes as steps, and the use of rows."""
    uses, steps = np.zeros((sizes.replicas, len(c.USES)), np.int64), 0
    for tiles in passes(sizes, sequences):
        device.prefill(tiles)
        steps += 1
        uses[:, _PREFILL] += tiles[..., c.TILE_COUNT].sum(axis=1)
    uses[:, _IDLE] = steps * sizes.prompt_rows - uses[:, _PREFILL]
    for sequence in sequences:
        sequence.num_computed = sequence.shared
    return c.DispatchResult(None, uses, steps, None, None, None)
