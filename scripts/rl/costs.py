"""A correction of a cost table: seconds of engine steps and of training as the runs had them, in the form of engine.cost_table.

Engine steps are fitted by least squares to the seconds of generation of each optimizer step, without drafts. They hold prompts,
the host and reading, as those of scripts/bench.py cost do.
"""

from __future__ import annotations

import datetime
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from gpu.part import Part
from rl.arms import Shape

FROM = ("sync", "tail_batching")  # modes whose learner and engine take turns, without drafts


def correct(part: Part, shape: Shape) -> None:
    """Writes the table of a shape, with date and device, and how far it is from what was predicted."""
    arms = {mode: part.told[f"{shape.name}.{mode}"] for mode in FROM if f"{shape.name}.{mode}" in part.told}
    steps = [step for found in arms.values() for step in found.get("by_step", ())]
    if not steps:
        part.figure(f"{shape.name}.costs.absent", "no run of the shape generated and trained in turns")
        return
    device = part.told[f"{shape.name}.sync.predicted"]["device"]
    table = {"figures": fitted(steps), "date": datetime.date.today().isoformat(), "device": device}
    part.figure(f"{shape.name}.costs", table | {"shape": shape.preset, "runs": list(arms), "steps": len(steps)})


def fitted(steps: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Returns the figures of a cost table: step_s by rows, train_token_s and train_step_s.

    Sizes that least squares gives no positive seconds are left out, and the others are fitted again.
    """
    sizes = sorted({int(size) for step in steps for size in step["sizes"]})
    seconds = np.array([step["gen_s"] for step in steps])
    while True:
        counts = np.array([[step["sizes"].get(str(size), 0.0) for size in sizes] for step in steps])
        found = np.linalg.lstsq(counts, seconds, rcond=None)[0]
        if len(sizes) == 1 or found.min() > 0:
            break
        del sizes[int(found.argmin())]
    tokens, trained = (sum(step[name] for step in steps) for name in ("tokens", "train_s"))
    return {
        "step_s": {str(size): float(s) for size, s in zip(sizes, found)},
        "train_token_s": trained / tokens,
        "train_step_s": sum(step["publish_s"] for step in steps) / len(steps),
    }
