"""Numbers that outsiders checked: one law with and without cuts, LUSPO's mean, and the engines and runs nobody had checked.

1. laws: sampling with and without cuts beside a row; `generate`, the server and a run whose evaluation cuts; LUSPO.
2. engines: bfloat16, tensor parallel, both; each over order, slots, pages, parks, sleep, swaps and drafts, against numpy.
   Elastic layouts against one that never moved.
3. runs: pipelined and LoRA resumes, lent devices, a judge, and `serve --run`, each against another way to the same numbers.

Oracles are numpy code written from the papers (tests/numpy_llama.py, tests/numpy_cached.py, tests/sampler.py).
"""

from __future__ import annotations

import importlib
import os

MINUTES = 15.0
PLATFORM = "cpu"
PARTS = ("laws", "engines", "runs")
SOURCES = ("scripts/number_checks/*.py", "jaxrl_post.main")

os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=4")


def show(record) -> None:
    for name in PARTS:
        importlib.import_module(f"number_checks.{name}").show(record)
