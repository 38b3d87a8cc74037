"""A grid world as text: the policy moves step by step from its place to the goal.

Rows have the columns `start` and `goal`, two digits each: x and y (data task "grid_world"). The policy is told "12,40":
it is at x=1, y=2, and the goal is at x=4, y=0.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

SIDE = 5
MOVES = {"u": (0, 1), "d": (0, -1), "l": (-1, 0), "r": (1, 0)}


def moved(place: tuple[int, int], move: str) -> tuple[int, int]:
    """Returns where a move leads. A move out of the grid, or an unknown one, leads nowhere."""
    x, y = (a + b for a, b in zip(place, MOVES.get(move, (0, 0)), strict=True))
    return (x, y) if 0 <= x < SIDE and 0 <= y < SIDE else place


def told(place: tuple[int, int], goal: tuple[int, int]) -> str:
    """Returns what the policy is told of a place."""
    return "{}{},{}{}".format(*place, *goal)


class GridWorld:
    """The policy writes u, d, l or r. The goal scores 1 and ends the conversation."""

    def reset(self, row: Mapping) -> list[dict]:
        """Returns the place and the goal."""
        (x, y), (a, b) = (map(int, row[name]) for name in ("start", "goal"))
        self._place, self._goal = (x, y), (a, b)
        return [{"role": "user", "content": told(self._place, self._goal)}]

    def step(self, messages: Sequence[Mapping]) -> tuple[list[dict], float, bool, dict]:
        """Returns the new place, or the score at the goal."""
        self._place = moved(self._place, messages[-1]["content"].strip())
        reached = self._place == self._goal
        seen = [] if reached else [{"role": "user", "content": told(self._place, self._goal)}]
        return seen, float(reached), reached, {"acc": float(reached)}
