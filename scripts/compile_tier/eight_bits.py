"""Bytes of a decode step of Qwen2.5-7B in 8 bits and in bfloat16, as a vendor's compiler made it, as one JSON line.

    python scripts/compile_tier/eight_bits.py TARGET ROWS FORMAT

One row for each of ROWS rollouts of CONTEXT tokens. Everything is of one device. Bytes are counted in the optimised text of the
program that a run executes (scripts/traffic.py), with formulas for kernels (scripts/kernel_costs.py). `widened_mib` is the largest
array of a matrix's shape in more than 8 bits that the program keeps in memory. Run it with the Python of the compile tier.
"""

from __future__ import annotations

import json
import math
import os
import sys
from dataclasses import replace
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "scripts")]
CONTEXT, LENGTH, PAGE, STEPS = 4096, 4224, 128, 32
MIB = 1 << 20
MESHES = {"v5e": (2, 1, 2)}  # one v5e has no room for 64 rollouts


def step(target: str, rows: int, form: str) -> dict:
    """Returns bytes of a step, the floor of the same from shapes, and the largest matrix that is not in 8 bits."""
    import kernel_costs
    import test_programs
    import traffic
    from targets import TARGETS, shard_bytes

    from jaxrl_post.engine.eight_bit_weights import stored
    from jaxrl_post.models import cache_kinds
    from jaxrl_post.models.presets import PRESETS

    chip, model = TARGETS[target], PRESETS["qwen2_5_7b"]
    mesh = chip.mesh(replace(chip.rows, axes=MESHES.get(target, chip.rows.axes)))
    ways = mesh.shape["tensor"]
    sizes = dict(slots=rows, head_rows=rows, max_length=LENGTH, page_size=PAGE, pages=rows * LENGTH // PAGE)
    sizes |= dict(steps_per_dispatch=STEPS, weights=form, kv=form)
    programs, weights = test_programs.programs_of(model, mesh, (rows,), **sizes)
    text = programs.compiled[f"dispatch_{rows}"].as_text()
    found = traffic.count(text, kernel_costs.paged(lambda _: [CONTEXT] * rows, rows))
    boxes = [one for one in found.unknown if " " in one]
    assert not boxes, f"kernels without a formula: {boxes}"
    moved = sum(one.bytes / (1 if one.loops else STEPS) for one in found.costs)
    read = shard_bytes(weights) - shard_bytes({"embed": weights["embed"]})
    numbers, scales = cache_kinds.held(model.kept, ways), cache_kinds.held_scales(model.kept, ways)
    position = 2 * numbers if form == "auto" else numbers + 4 * scales
    floor = read + rows * (CONTEXT + 1) * position + rows * model.embed * 2
    matrices = stored(model, "int8")
    return {
        "moved_gb": moved / 1e9,
        "floor_gb": floor / 1e9,
        "moved_over_floor": moved / floor,
        "widened_mib": widened(text, matrices, ways, rows) / MIB,
    }


def widened(text: str, model, ways: int, rows: int) -> int:
    """Returns the bytes of the largest array in memory that has as many numbers as a matrix of a layer, in 16 or 32 bits.

    One with an axis of all rows is no matrix."""
    import compiled_text

    from jaxrl_post.models import decoder

    layer = decoder.abstract(model)["layers"]["0"]
    counts = {leaf.size // ways for name, leaf in layer.items() if f"{name}_scale" in layer}
    made = (array for run in compiled_text.read(text).runs() for array in run.line.arrays)
    wide = (
        one.bytes
        for one in made
        if not one.place and one.dtype_bytes > 1 and math.prod(one.dims) in counts and rows not in one.dims
    )
    return max(wide, default=0)


if __name__ == "__main__":
    os.environ.pop("JAX_COMPILATION_CACHE_DIR", None)  # a cache would answer for the compiler
    os.environ |= {"JAX_PLATFORMS": "cpu"}
    from jaxrl_post.launch.plan import device_less

    device_less.take_none()
    target, rows, form = sys.argv[1:]
    print(json.dumps(step(target, int(rows), form)))
