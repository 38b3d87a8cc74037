"""How prompt positions become tiles of the wide prompt program, and how many KV entries a prompt then reads.

A tile holds PROMPT_TILE positions of one prompt, from a multiple of PROMPT_TILE on. A pass computes the same number of
tiles for every replica. A prompt's tiles follow each other, in one pass or in several.

Invariant: the tiles of a prompt follow from its length alone. The pass and the place of a tile depend on other prompts,
and change no bit.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from jaxrl_post.engine.host import wire as c
from jaxrl_post.engine.host.device import RowDevice
from jaxrl_post.engine.host.sequence import SequenceState

_PREFILL, _IDLE = c.USES.index("prefill"), c.USES.index("idle")


def tiles(sequence: SequenceState) -> Iterator[tuple[int, int, int]]:
    """Yields (slot, first position, number of positions) of the tiles of a prompt.

    The last position has no place here: its row samples, so the row program computes it."""
    for first in range(0, sequence.shared, c.PROMPT_TILE):
        yield sequence.slot, first, min(c.PROMPT_TILE, sequence.shared - first)


def passes(sizes: c.Sizes, sequences: Sequence[SequenceState]) -> Iterator[np.ndarray]:
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


def compute(device: RowDevice, sizes: c.Sizes, sequences: Sequence[SequenceState]) -> c.DispatchResult:
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


def entries_read(length: int, page: int, tile: int) -> int:
    """Returns how many KV entries of a layer are read to compute a prompt of `length` positions, in whole pages.

    Each group of `tile` positions reads its prefix once. The row program reads it for each row: `tile` is 1."""
    ends = (min(first + tile, length) for first in range(0, length, tile))
    return sum(-(-end // page) * page for end in ends)
