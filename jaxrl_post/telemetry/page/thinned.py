"""Which steps of a long run a page shows: evenly spaced ones, always with the first and the last."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import TypeVar

Item = TypeVar("Item")


def evenly(items: Sequence[Item], most: int) -> list[Item]:
    """Returns at most `most` items in their order, evenly spaced. The first and the last are among them.

    Raises:
      ValueError: `most` is below 2.
    """
    if most < 2:
        raise ValueError(f"most={most} must be at least 2: the first item and the last")
    if len(items) <= most:
        return list(items)
    return [items[round(place * (len(items) - 1) / (most - 1))] for place in range(most)]


def parts(items: Sequence[Item], most: int) -> list[Sequence[Item]]:
    """Returns all items, cut into at most `most` runs of nearly equal size."""
    count = min(most, len(items))
    cuts = [round(place * len(items) / count) for place in range(count + 1)] if count else [0]
    return [items[first:last] for first, last in itertools.pairwise(cuts)]
