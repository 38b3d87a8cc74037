"""Temporary memory of an engine's programs for rollouts of 131,072 tokens and of 8,192, as a vendor's compiler made them, as JSON.

    python scripts/compile_tier/long_texts.py TARGET

The model is Qwen3-8B on the slice of a target (targets.py). Every slot has pages for a whole rollout. A prompt program is there, and
a drafter whose tables hold the suffix arrays of a group for each slot. Run it with the Python of the compile tier.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "scripts")]
LONG, SHORT = 131_072, 8_192
SLOTS, GROUP, PAGE, ROWS, WIDE, STEPS = 4, 16, 128, 16, 2048, 32
MIB = 1 << 20


def main(target: str) -> dict[str, float]:
    import jax.numpy as jnp
    from targets import TARGETS

    from jaxrl_post.engine import compiled
    from jaxrl_post.engine.host.wire import EngineSettings
    from jaxrl_post.engine.speculation import suffix_array
    from jaxrl_post.engine.speculation.suffix_drafter import Histospec
    from jaxrl_post.models.presets import PRESETS

    chip, model = TARGETS[target], PRESETS["qwen3_8b_128k"]
    mesh = chip.mesh(chip.rows)
    found = {}
    for length in (SHORT, LONG):
        sizes = EngineSettings(
            slots=SLOTS,
            max_length=length,
            page_size=PAGE,
            pages=SLOTS * length // PAGE,
            head_rows=ROWS,
            row_sizes=(ROWS,),
            prompt_rows=WIDE,
            steps_per_dispatch=STEPS,
            dtype=jnp.bfloat16,
        )
        entries = SLOTS * GROUP * (length + suffix_array.TAIL + 1)
        found[length] = compiled.temporaries(model, mesh, sizes, Histospec(width=8, entries=entries))
    return {
        f"{name}.{key}": value
        for name in found[LONG]
        for key, value in {
            "temp_mib": found[LONG][name] / MIB,
            "more_than_for_8192_mib": (found[LONG][name] - found[SHORT][name]) / MIB,
        }.items()
    }


if __name__ == "__main__":
    os.environ.pop("JAX_COMPILATION_CACHE_DIR", None)  # a cache would answer for the compiler
    os.environ |= {"JAX_PLATFORMS": "cpu"}
    from jaxrl_post.launch.plan import device_less

    device_less.take_none()
    print(json.dumps(main(sys.argv[1])))
