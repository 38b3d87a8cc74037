"""Bytes of a decode step whose samples are cut by top-k and top-p, and of one without cuts, as one JSON line.

    python scripts/compile_tier/cuts.py TARGET ROWS

Qwen2.5-1.5B on one device, ROWS slots of CONTEXT tokens, one row each. A step has a fixed part and one of each layer: the
dispatch is compiled with 2 and with 4 layers. Bytes are counted in the compiled text (scripts/traffic.py). On GPUs some passes
run only where a row needs them, so three kinds of requests are told apart:

- few: top-k below thresholds_gpu.MOST, with top-p or without
- mass: top-p alone
- all: both further passes run. On TPUs a kernel reads the logits once for all three.

Run it with the Python of the compile tier.
"""

from __future__ import annotations

import json
import os
import re
import sys
from dataclasses import replace
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "scripts")]
PRESET, CONTEXT, PAGE, STEPS = "qwen2_5_1_5b", 1024, 64, 32
FEW, MORE = 2, 4  # layers
PASSES = {"few": r"/top_[kp]/.*(cond|branch)", "mass": r"/top_k/.*(cond|branch)", "all": r"(?!)"}  # that do not run


def moved(target: str, rows: int, layers: int, *, restricted: bool) -> dict[str, float]:
    """Returns the bytes of a step by kind of request."""
    import kernel_costs
    import test_programs
    import traffic
    from targets import TARGETS

    from jaxrl_post.models.presets import PRESETS

    chip, model = TARGETS[target], replace(PRESETS[PRESET], layers=layers, windows=())
    sizes = dict(slots=rows, head_rows=rows, max_length=4 * CONTEXT, page_size=PAGE, pages=rows * 2 * CONTEXT // PAGE)
    programs, _ = test_programs.programs_of(
        model, chip.mesh(chip.one), (rows,), steps_per_dispatch=STEPS, restricted=restricted, **sizes
    )
    text = programs.compiled[f"dispatch_{rows}"].as_text()
    found = traffic.count(text, kernel_costs.paged(lambda _: [CONTEXT] * rows, rows))
    boxes = [one for one in found.unknown if " " in one]
    assert not boxes, f"kernels without a formula: {boxes}"
    return {
        kind: sum(one.bytes for one in found.costs if one.loops and not re.search(out, one.scope))
        for kind, out in PASSES.items()
    }


def main(target: str, rows: int) -> dict[str, float]:
    from jaxrl_post.models.presets import PRESETS

    plain, deeper = (moved(target, rows, layers, restricted=False)["all"] for layers in (FEW, MORE))
    cut = moved(target, rows, FEW, restricted=True)
    whole = plain + (PRESETS[PRESET].layers - FEW) * (deeper - plain) / (MORE - FEW)
    logits = 4 * rows * PRESETS[PRESET].vocab_size
    return {"step_gb": whole / 1e9} | {
        key: value
        for kind in PASSES
        for key, value in {
            f"{kind}.over_uncut": (whole + cut[kind] - plain) / whole,
            f"{kind}.times_the_logits": (cut[kind] - plain) / logits,
        }.items()
    }


if __name__ == "__main__":
    os.environ.pop("JAX_COMPILATION_CACHE_DIR", None)  # a cache would answer for the compiler
    os.environ |= {"JAX_PLATFORMS": "cpu"}
    from jaxrl_post.launch.plan import device_less

    device_less.take_none()
    print(json.dumps(main(sys.argv[1], int(sys.argv[2]))))
