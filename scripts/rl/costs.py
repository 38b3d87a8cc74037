"""A correction of a cost table: seconds of engine steps and of training as the runs had them, in the form of engine.cost_table.

Engine steps are fitted by least squares to the seconds of generation of each optimizer step, without drafts. They hold prompts,
the host and reading, as those of scripts/bench.py cost do. A size that no step had gets its predicted seconds, times what the
nearest measured size takes over its own. `scaled` names those sizes.
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
    predicted = part.told[f"{shape.name}.sync.predicted"]
    figures, device = fitted(steps), predicted["device"]
    figures["step_s"], guessed = completed(figures["step_s"], predicted["steps_s"])
    table = {"figures": figures, "date": datetime.date.today().isoformat(), "device": device, "scaled": guessed}
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


def completed(measured: Mapping[str, float], predicted: Mapping[str, float]) -> tuple[dict[str, float], list[str]]:
    """Returns seconds of all predicted sizes, and the sizes that were not measured, which are scaled."""
    missing = [size for size in predicted if size not in measured]
    near = {size: min(measured, key=lambda one: abs(int(one) - int(size))) for size in missing}
    scaled = {size: predicted[size] * measured[one] / predicted[one] for size, one in near.items()}
    return dict(measured) | scaled, missing
