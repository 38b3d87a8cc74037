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

import sys

import compilers
import grouped_walks as walks
import numpy as np
from record import ROOT

from jaxrl_post.models.presets import PRESETS

sys.path.append(str(ROOT / "scripts" / "compile_tier"))
from whole_programs import EXPERTS

MINUTES = 40.0
PLATFORM = "cpu"
SOURCES = (
    "scripts/compile_tier",
    "scripts/collectives.py",
    "scripts/compiled_text.py",
    "scripts/compilers.py",
    "scripts/traffic.py",
    "configs/models/gsm8k_qwen3.py",
    "configs/models/gsm8k_gpt_oss.py",
)
READ, SLACK = 1.1, 1.2
LEAST = {"train": 1.0, "rows": 0.5}
ROWS, ROUTINGS, WAYS = (4, 16, 64), 1000, (1, 4)  # WAYS: devices that divide a replica's layers


def show(record) -> None:
    rng = np.random.default_rng(0)
    for model in EXPERTS:
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

    planted = compilers.whole_program(record, python, "planted_experts")
    record.figure("planted_dense_products", planted["dense_products"], at_least=1)

    def more(program: str) -> dict:
        exchange = {"at_least": LEAST.get(program, 0), "at_most": SLACK}
        copied = {"copied_matrices": {"equals": 0}} if program == "rows" else {}
        return {"exchange_over_floor": exchange} | copied

    compilers.whole_programs(record, python, {model: where for model, (_, where) in EXPERTS.items()}, more)
