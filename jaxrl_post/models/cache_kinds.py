"""What the layers of a decoder keep of the tokens before: the one declaration behind every cache.

A layer declares pages of its own, or that it reads the pages of an earlier layer. Whoever makes, divides or counts a cache
reads the tuple of all layers' declarations (ModelConfig.kept), and knows no family.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Pages:
    """A key and a value of each earlier position, in pages.

    - kv_heads: of keys, and of values
    - head_dim: numbers of a key, and of a value
    - window: the latest positions that a token sees, itself included. None: all
    - of: the number of the layer whose pages this one reads. None: its own
    """

    kv_heads: int
    head_dim: int
    window: int | None = None
    of: int | None = None

    @property
    def entry(self) -> int:
        """Returns the numbers of one position."""
        return 2 * self.kv_heads * self.head_dim


def held(kept: Sequence[Pages], ways: int = 1) -> int:
    """Returns the numbers that a position takes in the pages of all layers, on one of `ways` devices that divide heads."""
    return sum(one.entry for one in kept if one.of is None) // ways


def read(kept: Sequence[Pages]) -> int:
    """Returns the numbers of a position that all layers together read. Pages of two layers are read twice."""
    return sum(one.entry for one in kept)


def places(kept: Sequence[Pages]) -> tuple[int, ...]:
    """Returns the place of each layer's pages among those of all layers that have their own."""
    own = [index for index, one in enumerate(kept) if one.of is None]
    return tuple(own.index(index if one.of is None else one.of) for index, one in enumerate(kept))


def shapes(kept: Sequence[Pages]) -> tuple[tuple[int, int], ...]:
    """Returns the different (kv_heads, head_dim) of the layers."""
    return tuple(dict.fromkeys((one.kv_heads, one.head_dim) for one in kept))


def whole_heads(kept: Sequence[Pages]) -> int:
    """Returns the most devices that can divide every layer's pages by heads."""
    return math.gcd(*(one.kv_heads for one in kept))
