"""Qwen3.5 9B and 35B-A3B and Gemma 4 31B and E4B compile at full depth for v6e, v5p and sm_90, within memory.

Train step, row program and weight swap of each preset are compiled in the environment of the compile tier
(scripts/compile_tier/whole_programs.py says what is counted). Of every program:
- the compiler takes at most CPU_S seconds of a CPU
- the memory of a device holds it, with what lies beside it in a run
- a swap goes through no host memory

A step of decoding moves at most OVER times the bytes of its weights, pages and states. Of 35B-A3B no product outside of the
grouped kernels has all experts' matrices for a side. The planted fault is a loop that copies its states. The count must
find more than OVER times their bytes in it. In the same loop without the copy it must find less.
"""

from __future__ import annotations

import concurrent.futures
import json
import sys

import compilers
from record import ROOT

from jaxrl_post.models.presets import PRESETS

sys.path.append(str(ROOT / "scripts" / "compile_tier"))
import whole_programs

MINUTES = 40.0
PLATFORM = "cpu"
LIMIT_S = 1800
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
CPU_S, OVER, AT_ONCE = 250, 1.15, 2


def show(record) -> None:
    python = compilers.python(record.root, "compile-hybrids")

    def compiled(*words: str) -> dict:
        said = record.said("scripts/compile_tier/whole_programs.py", *words, timeout_s=LIMIT_S, python=python)
        return json.loads(said.splitlines()[-1])

    planted = compiled("planted_states")
    record.figure("planted.once_over_floor", round(planted["once_over_floor"], 4), at_most=OVER)
    record.figure("planted.copied_over_floor", round(planted["copied_over_floor"], 4), at_least=OVER)
    programs = [
        (program, model, where)
        for model, (_, slices) in whole_programs.HYBRIDS.items()
        for where in slices
        for program in ("train", "rows", "swap")
    ]
    with concurrent.futures.ThreadPoolExecutor(AT_ONCE) as pool:
        told = list(pool.map(lambda words: record.cached("-".join(words), lambda: compiled(*words)), programs))
    for (program, model, where), found in zip(programs, told, strict=True):
        layers = len(PRESETS[model].expert_layers) if program == "rows" else 1
        bounds = {
            "cpu_s": {"at_most": CPU_S},
            "memory_mib": {"at_most": found.pop("hbm_mib")},
            "dense_products": {"equals": 0},
            "kernels": {"at_least": 3 * layers},
            "through_host": {"equals": 0},
            "decode_over_floor": {"at_most": OVER},
        }
        for name, value in found.items():
            figure = round(value, 4) if isinstance(value, float) else value
            record.figure(f"{model}.{where}.{program}.{name}", figure, **bounds.get(name, {}))
