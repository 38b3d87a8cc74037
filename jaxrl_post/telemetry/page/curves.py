"""Metrics by step, as a page draws them: every metric of metrics.jsonl, with 7 significant digits."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

MOST = 400  # steps that are drawn


_OF_REWARDS = (
    "critic/score/",
    "critic/rewards/",
    "reward/",
    "reward_std",
    "frac_reward_zero_std",
    "response_length/correct",
)


def curves(rows: Sequence[Mapping[str, float]], written: bool = False) -> dict[str, Any]:
    """Returns the curves of a run.

    Rows of one step are joined: those of an evaluation belong to the step whose weights it used.

    Args:
      written: whether the data holds the rollouts. Then no curve is of their rewards.

    Returns:
      steps: the steps drawn, at most MOST of those with a row.
      all: the number of steps with a row.
      metrics: name -> value by step. None: the row has no such metric, or it is not finite.
    """
    joined: dict[int, dict[str, float]] = {}
    for row in rows:
        joined.setdefault(int(row["step"]), {}).update({name: value for name, value in row.items() if name != "step"})
    steps = evenly(sorted(joined), MOST)
    evaluated = [step for step in sorted(joined) if any(name.startswith("val-") for name in joined[step])]
    steps = sorted({*steps, *evenly(evaluated, MOST)})
    names = sorted({name for step in steps for name in joined[step]})
    names = [name for name in names if not (written and name.startswith(_OF_REWARDS))]
    return {
        "steps": steps,
        "all": len(joined),
        "metrics": {name: [number(joined[step].get(name)) for step in steps] for name in names},
    }


def number(value: float | None, digits: int = 7) -> float | None:
    """Returns a number with so many significant digits. None: there is none, or it is not finite."""
    if value is None or not math.isfinite(value):
        return None
    rounded = float(f"{value:.{digits}g}")
    return int(rounded) if rounded == int(rounded) and abs(rounded) < 1e15 else rounded


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
