"""What the layers of a decoder keep of the tokens before: the one declaration behind every cache.

A layer declares pages of its own, that it reads the pages of an earlier layer, or a state of one size for any number of tokens.
Whoever makes, divides or counts a cache reads the tuple of all layers' declarations (ModelConfig.kept), and knows no family.
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


@dataclass(frozen=True, kw_only=True)
class RecurrentState:
    """A matrix for each value head (models/gated_delta.py), and the last inputs of a causal convolution.

    - key_heads, value_heads: of the convolution's inputs. There are as many matrices as value heads
    - key_dim, value_dim: rows and columns of a matrix
    - width: positions that the convolution reads, its own included
    """

    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int
    width: int

    @property
    def of(self) -> None:
        """Returns None: no layer reads another one's state."""
        return None

    @property
    def matrices(self) -> int:
        """Returns the numbers of all matrices."""
        return self.value_heads * self.key_dim * self.value_dim

    @property
    def values(self) -> int:
        """Returns the numbers that a position reads of all matrices."""
        return self.value_heads * self.value_dim

    @property
    def inputs(self) -> int:
        """Returns the numbers that the convolution reads of a position."""
        return 2 * self.key_heads * self.key_dim + self.values


Kind = Pages | RecurrentState


def paged(kept: Sequence[Kind]) -> list[Pages]:
    """Returns the declarations of the layers that have or read pages."""
    return [one for one in kept if isinstance(one, Pages)]


def states(kept: Sequence[Kind]) -> list[RecurrentState]:
    """Returns the declarations of the layers that have a state."""
    return [one for one in kept if isinstance(one, RecurrentState)]


def held(kept: Sequence[Kind], ways: int = 1) -> int:
    """Returns the numbers that a position takes in the pages of all layers, on one of `ways` devices that divide heads."""
    return sum(one.entry for one in paged(kept) if one.of is None) // ways


def read(kept: Sequence[Kind]) -> int:
    """Returns the numbers of a position that all layers together read. Pages of two layers are read twice."""
    return sum(one.entry for one in paged(kept))


def held_scales(kept: Sequence[Kind], ways: int = 1) -> int:
    """Returns the scales that a position takes in pages of codes, of all layers, as `held` counts numbers."""
    return sum(2 * one.kv_heads for one in paged(kept) if one.of is None) // ways


def read_scales(kept: Sequence[Kind]) -> int:
    """Returns the scales of a position that all layers together read from pages of codes."""
    return sum(2 * one.kv_heads for one in paged(kept))


def places(kept: Sequence[Kind]) -> tuple[int, ...]:
    """Returns the place of each layer's pages or state among those of all layers that have their own."""
    own = [index for index, one in enumerate(kept) if one.of is None]
    return tuple(own.index(index if one.of is None else one.of) for index, one in enumerate(kept))


def shapes(kept: Sequence[Kind]) -> tuple[tuple[int, int], ...]:
    """Returns the different (kv_heads, head_dim) of the layers with pages."""
    return tuple(dict.fromkeys((one.kv_heads, one.head_dim) for one in paged(kept)))


def whole_heads(kept: Sequence[Kind]) -> int:
    """Returns the most devices that can divide every layer's pages and states by heads."""
    return math.gcd(*(one.kv_heads if isinstance(one, Pages) else one.key_heads for one in kept))
