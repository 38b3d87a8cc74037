"""Kernels of a decode step on an H100: of a layer and outside of the layers, as the vendor's compiler made them, as one JSON line.

    python scripts/compile_tier/nodes.py PRESET ROWS

The dispatch of ROWS rows and 256 slots is compiled with 2 and with 4 layers of the model's width. A kernel is an instruction of
the dispatch's loop that the device runs: a fusion, a custom call, a reduction, a sort, a copy. `by_name` counts those outside of
the layers by the function that made them. Run it with the Python of the compile tier.
"""

from __future__ import annotations

import collections
import json
import os
import re
import sys
from dataclasses import replace
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "scripts")]
SLOTS, PAGE, BLOCKS, STEPS, TARGET = 256, 64, 67, 32, "sm_90"
FEW, MORE = 2, 4  # layers


def kernels(preset: str, rows: int, layers: int) -> list[tuple[str, int]]:
    """Returns of each kernel of a step the name of what made it, and the bytes of a copy. 0: it is none."""
    import compiled_text
    import test_programs
    import traffic
    from targets import TARGETS

    from jaxrl_post.models.presets import PRESETS

    chip, model = TARGETS[TARGET], replace(PRESETS[preset], layers=layers, windows=())
    sizes = dict(slots=SLOTS, head_rows=SLOTS, max_length=PAGE * BLOCKS, page_size=PAGE, pages=SLOTS * BLOCKS)
    programs, _ = test_programs.programs_of(model, chip.mesh(chip.rows), (rows,), steps_per_dispatch=STEPS, **sizes)
    text = compiled_text.read(programs.compiled[f"dispatch_{rows}"].as_text())
    found = []
    for run in traffic.launched(text):
        if run.loops:
            copied = sum(one.bytes for one in run.line.arrays) if _copies(text, run) else 0
            found.append((named(run.line), copied))
    return found


def _copies(text, run) -> bool:
    """Returns whether a kernel is a copy and nothing else."""
    inside = [one.line.operation for one in text.within(run)]
    return run.line.operation == "copy" or (bool(inside) and set(inside) <= {"parameter", "copy", "bitcast", "tuple"})


def named(line) -> str:
    """Returns the innermost function or scope that made a line, and its operation."""
    scopes = [part for part in line.scope.split("/") if not re.match(r"(jit|vmap|while|body|closed_call|pjit)\b", part)]
    return "/".join(scopes[-2:]) or line.operation


def main(preset: str, rows: int) -> dict:
    few, more = (kernels(preset, rows, layers) for layers in (FEW, MORE))
    layer = (len(more) - len(few)) / (MORE - FEW)
    counted = [collections.Counter(name for name, _ in found) for found in (few, more)]
    by_layer = {name: (counted[1][name] - counted[0][name]) / (MORE - FEW) for name in counted[1]}
    outside = {name: count - FEW * by_layer.get(name, 0) for name, count in counted[0].items()}
    return {
        "layer": layer,
        "outside": len(few) - FEW * layer,
        "copies": sorted(size for _, size in few if size),
        "by_name_of_a_layer": {name: count for name, count in sorted(by_layer.items()) if count},
        "by_name_outside": {name: count for name, count in sorted(outside.items()) if count},
    }


if __name__ == "__main__":
    os.environ.pop("JAX_COMPILATION_CACHE_DIR", None)  # a cache would answer for the compiler
    os.environ |= {"JAX_PLATFORMS": "cpu"}
    from jaxrl_post.launch.plan import device_less

    device_less.take_none()
    print(json.dumps(main(sys.argv[1], int(sys.argv[2]))))
