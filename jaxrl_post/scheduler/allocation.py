"""How many replicas each rank group gets: HistoPipe's second tier (RhymeRL, arXiv 2508.18588, section 5).

Rank groups m = 0 .. M-1, by ascending length, lie side by side over W replicas; a profiled curve says what each would take
on 1, 2, .. of them. The paper searches by bisection for the allocation whose ends form a line, so that ascending and
descending steps fit together. Here that line is where the search begins; it ends where moving one replica helps no more.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from jaxrl_post.scheduler.forecast import Replica, replay, share

TILTS = (0.0, 0.25, 0.5, 0.75, 1.0)  # of a line: its height at the first replica as a share of that at the last
HALVINGS = 40


def curve(replica: Replica, work: Sequence[tuple[int, int]], most: int) -> np.ndarray:
    """float64[most]: seconds of 1, 2, .. replicas for answers (prompt tokens, answer tokens), non-increasing."""
    return np.minimum.accumulate([replay(replica, share(work, count)).seconds for count in range(1, most + 1)])


def spread(curves: np.ndarray, sizes: Sequence[int]) -> np.ndarray:
    """Seconds of each replica, when rank group m lies on `sizes[m]` of them."""
    return np.repeat([seconds[size - 1] for seconds, size in zip(curves, sizes, strict=True)], sizes)


def barrier(seconds: np.ndarray) -> float:
    """What a step takes where the next one waits for it."""
    return float(seconds.max())


def two_steps(seconds: np.ndarray) -> float:
    """What an ascending and a descending step take together where replicas do not wait for each other."""
    return float((seconds + seconds[::-1]).max())


def allocate(curves: np.ndarray, replicas: int, objective: Callable[[np.ndarray], float]) -> list[int]:
    """Replicas of each rank group, at least 1, all in use; as evenly as can be where the objective does not tell them apart.

    Args:
      curves: [M, W] seconds of rank group m on 1 .. W of the replicas, non-increasing along W.
      objective: of the seconds of each replica: `barrier` or `two_steps`.
    Raises:
      ValueError: fewer replicas than rank groups.
    """
    if replicas < len(curves):
        raise ValueError(f"balance: {len(curves)} rank groups for {replicas} replicas; the nearest valid number of rank groups "
                         f"is {replicas}")
    starts = [[len(block) for block in np.array_split(np.arange(replicas), len(curves))]]
    starts += [found for found in (_line(curves, replicas, tilt) for tilt in TILTS) if found]
    return min((_climb(curves, sizes, objective) for sizes in starts), key=lambda end: end[0])[1]


def _line(curves: np.ndarray, replicas: int, tilt: float) -> list[int] | None:
    """The lowest line under which the rank groups fit, by bisection; what is left over goes to the longest."""
    low, high = 0.0, float(curves.max()) * 2 * replicas
    found = _below(curves, replicas, tilt, high)
    for _ in range(HALVINGS):
        middle = (low + high) / 2
        sizes = _below(curves, replicas, tilt, middle)
        low, high, found = (low, middle, sizes) if sizes else (middle, high, found)
    return found and [*found[:-1], found[-1] + replicas - sum(found)]


def _below(curves: np.ndarray, replicas: int, tilt: float, top: float) -> list[int] | None:
    """The fewest replicas for each rank group whose middle then lies below the line; None where they are not enough."""
    sizes, counts = [], np.arange(1, curves.shape[1] + 1)
    for seconds in curves:
        allowed = top * (tilt + (1 - tilt) * (sum(sizes) + counts / 2) / replicas)
        fitting = np.flatnonzero(seconds <= allowed)
        if not fitting.size:
            return None
        sizes.append(int(counts[fitting[0]]))
    return sizes if sum(sizes) <= replicas else None


def _climb(curves: np.ndarray, sizes: list[int], objective: Callable[[np.ndarray], float]) -> tuple[float, list[int]]:
    """Moves one replica at a time from one rank group to another while that helps."""
    best = objective(spread(curves, sizes)), sizes
    while True:
        _, sizes = best
        moves = [[size + (m == to) - (m == of) for m, size in enumerate(sizes)]
                 for of in range(len(sizes)) for to in range(len(sizes)) if of != to and sizes[of] > 1]
        better = min(((objective(spread(curves, move)), move) for move in moves), default=best)
        if better[0] >= best[0]:
            return best
        best = better
