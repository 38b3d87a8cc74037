"""Models with experts compile at full depth for TPU v5p and v6e and for sm_90, and read only the experts that rows chose.

Train step, row program and weight swap of each preset are compiled in the environment of the compile tier
(scripts/compile_tier/whole_programs.py says what is counted). In every program:
- the memory of a device holds it, with what lies beside it in a run
- no product outside of the grouped kernels has all experts' matrices for a side, and no line of the row program copies them
- rows that are gathered, and sums that are scattered, have at most SLACK times the bytes of doing each once. Fewer than LEAST
  times would be a count that missed some.

The walk is the kernels' own: visits and index maps on numpy, over random routings. The planted fault is XLA:GPU's ragged_dot,
in which the count must find a product over all experts.
"""

from __future__ import annotations

import concurrent.futures
import json
import sys

import compilers
import grouped_walks as walks
import numpy as np
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
    "scripts/traffic.py",
    "configs/models/gsm8k_qwen3.py",
    "configs/models/gsm8k_gpt_oss.py",
)
CPU_S, READ, SLACK, AT_ONCE = 250, 1.1, 1.2, 2
LEAST = {"train": 1.0, "rows": 0.5}
ROWS, ROUTINGS, WAYS = (4, 16, 64), 1000, (1, 4)  # WAYS: devices that divide a replica's layers


def show(record) -> None:
    rng = np.random.default_rng(0)
    for model in whole_programs.EXPERTS:
        shape = PRESETS[model]
        for rows in ROWS:
            sizes = walks.routings(rng, ROUTINGS, rows, shape.experts.count, shape.experts.per_token)
            for platform, read in walks.READ.items():
                for ways in WAYS:
                    sides = shape.embed, shape.experts.ffw // ways
                    told = [
                        read(sizes, rows * shape.experts.per_token, *pair) / walks.chosen(sizes, *pair)
                        for pair in (sides, sides[::-1])
                    ]
                    key = f"{model}.walk.{platform}.{rows}_rows.tensor_{ways}.most_read_over_chosen"
                    record.figure(key, float(np.max(told)), at_most=READ)
    python = compilers.python(record.root, "compile-experts")

    def compiled(*words: str) -> dict:
        said = record.said("scripts/compile_tier/whole_programs.py", *words, timeout_s=LIMIT_S, python=python)
        return json.loads(said.splitlines()[-1])

    record.figure("planted_dense_products", compiled("planted_experts")["dense_products"], at_least=1)
    programs = [
        (program, model, where)
        for model, (_, slices) in whole_programs.EXPERTS.items()
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
            "exchange_over_floor": {"at_least": LEAST.get(program, 0), "at_most": SLACK},
            "through_host": {"equals": 0},
        } | ({"copied_matrices": {"equals": 0}} if program == "rows" else {})
        for name, value in found.items():
            figure = round(value, 4) if isinstance(value, float) else value
            record.figure(f"{model}.{where}.{program}.{name}", figure, **bounds.get(name, {}))
