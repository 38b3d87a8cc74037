"""Train steps with rows of 65,536 and 131,072 tokens compile for TPU v5p and sm_90, within memory and near the links' floor.

1. Qwen3-8B at 65,536 tokens and Qwen3-32B at 131,072, at full depth, as configs/models/long_qwen3.py sets them. Devices along
   fsdp share rows. scripts/compile_tier/long_rows.py says how everything is counted.
2. The engine of Qwen3-8B for rollouts of 131,072 tokens takes no more temporary memory than for 8,192, in any of its programs
   (scripts/compile_tier/long_texts.py).
"""

from __future__ import annotations

import time

import compilers

MINUTES = 10.0
LIMIT_MINUTES = 40.0
SOURCES = (
    "scripts/compile_tier",
    "scripts/compilers.py",
    "scripts/compiled_text.py",
    "scripts/collectives.py",
    "scripts/traffic.py",
    "scripts/kernel_costs.py",
)
PROGRAMS = {"8b-v5p-16": "v5p-16", "8b-8xh100": "8xh100", "32b-v5p-128": "v5p-128", "32b-8x8xh100": "8x8xh100"}
FLOPS, LINKS = 1.45, 1.3  # over what training needs, and over the floor of links
ENGINES, GROWTH_MIB = ("v5p", "sm_90"), 4.0


def show(record) -> None:
    python, begun = compilers.python(record.root, "compile-long"), time.monotonic()
    for choice, where in PROGRAMS.items():
        found = compilers.told(record, python, "scripts/compile_tier/long_rows.py", choice, where)
        bounds = {
            "memory_mib": {"at_most": found["hbm_mib"]},
            "cpu_s": {"at_most": compilers.CPU_S},
            "flops_over_useful": {"at_most": FLOPS},
            "links_over_floor": {"at_most": LINKS},
        }
        for name, value in found.items():
            record.figure(f"{choice}.{name}", round(value, 4), **bounds.get(name, {}))
    for target in ENGINES:
        for name, value in compilers.told(record, python, "scripts/compile_tier/long_texts.py", target).items():
            bound = {"at_most": GROWTH_MIB} if "more_than" in name else {}
            record.figure(f"engine_{target}.{name}", round(value, 3), **bound)
    record.figure("minutes", (time.monotonic() - begun) / 60, at_most=LIMIT_MINUTES)
