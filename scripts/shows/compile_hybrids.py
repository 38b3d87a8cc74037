"""Qwen3.5 9B and 35B-A3B and Gemma 4 31B and E4B compile at full depth for v6e, v5p and sm_90, within memory.

Train step, row program and weight swap of each preset are compiled in the environment of the compile tier
(scripts/compile_tier/whole_programs.py says what is counted). Of every program:
- the compiler takes at most compilers.CPU_S seconds of a CPU
- the memory of a device holds it, with what lies beside it in a run
- a swap goes through no host memory

A step of decoding moves at most OVER times the bytes of its weights, pages and states. Of 35B-A3B no product outside of the
grouped kernels has all experts' matrices for a side. The planted fault is a loop that copies its states. The count must
find more than OVER times their bytes in it. In the same loop without the copy it must find less.
"""

from __future__ import annotations

import sys

import compilers
from record import ROOT

sys.path.append(str(ROOT / "scripts" / "compile_tier"))
from whole_programs import HYBRIDS

MINUTES = 40.0
PLATFORM = "cpu"
SOURCES = (
    "scripts/compile_tier",
    "scripts/collectives.py",
    "scripts/compiled_text.py",
    "scripts/compilers.py",
    "scripts/kernel_costs.py",
    "scripts/traffic.py",
    "configs/models/gsm8k_qwen3_5.py",
    "configs/models/gsm8k_gemma4.py",
)
OVER = 1.15


def show(record) -> None:
    python = compilers.python(record.root, "compile-hybrids")
    planted = compilers.whole_program(record, python, "planted_states")
    record.figure("planted.once_over_floor", round(planted["once_over_floor"], 4), at_most=OVER)
    record.figure("planted.copied_over_floor", round(planted["copied_over_floor"], 4), at_least=OVER)
    slices = {model: where for model, (_, where) in HYBRIDS.items()}
    compilers.whole_programs(record, python, slices, lambda program: {"decode_over_floor": {"at_most": OVER}})
