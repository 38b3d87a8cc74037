"""Train steps with rows of 65,536 and 131,072 tokens compile for TPU v5p and sm_90, within memory and near the links' floor.

Qwen3-8B at 65,536 tokens and Qwen3-32B at 131,072, at full depth, as configs/models/long_qwen3.py sets them. Devices along fsdp
share rows. scripts/compile_tier/long_rows.py says how everything is counted.
"""

from __future__ import annotations

import json
import time

import compilers

MINUTES = 5.0
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


def show(record) -> None:
    python, begun = compilers.python(record.root, "compile-long"), time.monotonic()
    for choice, where in PROGRAMS.items():

        def counted(words: tuple[str, str] = (choice, where)) -> dict:
            script = "scripts/compile_tier/long_rows.py"
            said = record.said(script, *words, timeout_s=compilers.LIMIT_S, python=python)
            return json.loads(said.splitlines()[-1])

        found = record.cached(choice, counted)
        bounds = {
            "memory_mib": {"at_most": found["hbm_mib"]},
            "cpu_s": {"at_most": compilers.CPU_S},
            "flops_over_useful": {"at_most": FLOPS},
            "links_over_floor": {"at_most": LINKS},
        }
        for name, value in found.items():
            record.figure(f"{choice}.{name}", round(value, 4), **bounds.get(name, {}))
    record.figure("minutes", (time.monotonic() - begun) / 60, at_most=LIMIT_MINUTES)
