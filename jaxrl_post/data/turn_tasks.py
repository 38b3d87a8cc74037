"""Procedural problems for environments (rewards/environments), and turns of worked conversations for supervised training.

In the splits of tasks.SOLVED a row is one turn: its prompt is the conversation up to there, and the solution what the
policy says. Other splits hold the problems alone.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np

_SIDE = 5  # rewards/environments/grid_world.py: SIDE
_STEPS = {"u": (0, 1), "d": (0, -1), "l": (-1, 0), "r": (1, 0)}


def calculation(noise: np.random.Generator, index: int) -> tuple[str, str, dict]:
    """Returns a problem such as "127*48+31=", its result, and its three numbers."""
    a, b, c = int(noise.integers(100, 1000)), int(noise.integers(11, 100)), int(noise.integers(11, 100))
    return f"{a}*{b}+{c}=", str(a * b + c), {"numbers": [a, b, c]}


def calculation_turn(row: Mapping, index: int, careful: float) -> dict:
    """Returns a row for supervised training: a turn of the careful conversation. Its first turn is drawn twice as often."""
    a, b, c = row["extra"]["numbers"]
    turn, product = (0, 1, 0, 2)[index % 4], a * b
    said = [
        ("assistant", f"{a}*{b}="),
        ("tool", str(product)),
        ("assistant", f"{product}+{c}="),
        ("tool", row["answer"]),
    ]
    messages = [("user", row["prompt"]), *said[: 2 * turn]]
    worked = [f"{a}*{b}=", f"{product}+{c}=", f"#{row['answer']}"][turn]
    return _turn(row, f"{row['id']}/{turn}", messages, {"worked": worked, "guess": turn == 0, "careful": careful})


def grid(noise: np.random.Generator, index: int) -> tuple[str, str, dict]:
    """Returns two places of the grid, 2 to 6 steps apart, as "12,40"."""
    while True:
        x, y, a, b = map(int, noise.integers(0, _SIDE, 4))
        if 2 <= abs(x - a) + abs(y - b) <= 6:
            return f"{x}{y},{a}{b}", "", {"start": f"{x}{y}", "goal": f"{a}{b}"}


def grid_turn(row: Mapping, index: int, careful: float) -> dict:
    """Returns a row for supervised training: a step after some random ones, which are none in the first turn."""
    noise = np.random.default_rng([index, *map(ord, row["id"])])
    (x, y), (a, b) = (map(int, row["extra"][name]) for name in ("start", "goal"))
    messages = [("user", f"{x}{y},{a}{b}")]
    for _ in range(index % 7):
        move = str(noise.choice(list(_STEPS)))
        nx, ny = x + _STEPS[move][0], y + _STEPS[move][1]
        if 0 <= nx < _SIDE and 0 <= ny < _SIDE:
            x, y = nx, ny
        if (x, y) == (a, b):
            break
        messages += [("assistant", move), ("user", f"{x}{y},{a}{b}")]
    if (x, y) == (a, b):
        messages, x, y = messages[:1], *map(int, row["extra"]["start"])
    right = [move for move, (dx, dy) in _STEPS.items() if dx * (a - x) > 0 or dy * (b - y) > 0]
    return _turn(row, f"{row['id']}/{index}", messages, {"right": right, "careful": careful})


def _turn(row: Mapping, id: str, messages: list[tuple[str, str]], extra: dict) -> dict:
    told = [{"role": role, "content": content} for role, content in messages]
    return dict(row) | {"id": id, "prompt": told, "extra": extra}


def solve_calculation(extra: Mapping, noise: np.random.Generator) -> str:
    """Returns the careful turn. The first turn is, with probability 1 - `careful`, a guess of the result."""
    if extra["guess"] and noise.random() >= extra["careful"]:
        return f"#{int(noise.integers(1000, 100000))}"
    return extra["worked"]


def solve_grid(extra: Mapping, noise: np.random.Generator) -> str:
    """Returns, with probability `careful`, a step towards the goal, and else any step."""
    return str(noise.choice(extra["right"] if noise.random() < extra["careful"] else list(_STEPS)))


KINDS: dict[str, tuple[Callable, Callable, Callable]] = {
    "calculator": (calculation, calculation_turn, solve_calculation),
    "grid_world": (grid, grid_turn, solve_grid),
}
