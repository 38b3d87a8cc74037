"""Kernels, engine programs and train steps compile for real for TPUs and GPUs that are not there, at full depth.

Runs the second tier of tests (`make test-compile`, which makes its own environment) and writes its table. For every
program and target the table has the CPU seconds of compilation, temporary memory with its bound, and memory in all. It
also has the chip's memory, registers and spilled bytes. Of train steps it has FLOPs over useful ones, bytes, and bytes
of collectives, counted in the compiled text. Row program, wide program and train steps have all layers. Seconds are
judged beside their bounds here, because a busy machine inflates them. Tests with such bounds run first, one after
another and on one core: threads that wait for each other, and share caches, take more CPU seconds for the same work.
The others run in two processes.
"""

from __future__ import annotations

import functools
import json
import os
import re
import subprocess
import tempfile
import time
from pathlib import Path

import compilers

MINUTES = 25.0
LIMIT_S = 3600
SOURCES = (
    "scripts/compile_tier",
    "scripts/make_venv.sh",
    "scripts/compiled_text.py",
    "scripts/compilers.py",
    "scripts/collectives.py",
    "scripts/traffic.py",
    "scripts/kernel_costs.py",
)  # what `make test-compile` runs
DEEPER, USEFUL = 1.2, 1.35  # seconds of full depth over those of 2 layers; FLOPs over those that training needs
TARGETS = ("sm_90", "tpu7x", "v5e", "v5p", "v6e")


def show(record) -> None:
    compilers.python(record.root, "compile")
    rows, codes, start = [], [], time.monotonic()
    cores = os.sched_getaffinity(0)
    for which, allowed in (("-m timed -n 0", {min(cores)}), ("-m 'not timed'", cores)):
        found, done = _run(record, which, allowed)
        rows, codes = rows + found, [*codes, done.returncode]
        if done.returncode:
            print((done.stdout + done.stderr)[-4000:])
    record.figure("tier_s", round(time.monotonic() - start, 1), at_most=1500)
    record.figure("tier_exit_code", max(codes), equals=0)
    for row in rows:
        _row(record, dict(row))
    for target in TARGETS:
        record.figure(f"num_compiled.{target}", sum(row["target"] == target for row in rows), at_least=6)
    record.figure("num_spilled_bytes", sum(row.get("spill_bytes") or 0 for row in rows), equals=0)


def _run(record, which: str, cores: set[int]) -> tuple[list[dict], subprocess.CompletedProcess]:
    """Runs some of the tier's tests on these cores. Returns the rows of their table, and the finished process."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "table.json"
        done = subprocess.run(
            ["make", "test-compile", f"ARGS={which} --table={file}"],
            cwd=record.root,
            text=True,
            capture_output=True,
            timeout=LIMIT_S,
            preexec_fn=functools.partial(os.sched_setaffinity, 0, cores),
        )
        return json.loads(file.read_text()) if file.is_file() else [], done


def _row(record, row: dict) -> None:
    name = re.sub(r"[^a-z0-9_]+", "_", row.pop("program").lower()).strip("_")
    bound, chip, seconds = (row.get(key) or None for key in ("temp_bound_mib", "hbm_mib", "seconds_bound"))
    for key, value in row.items():
        if key == "target" or value == "":
            continue
        limit = {
            "temp_mib": bound,
            "total_mib": chip,
            "with_moments_mib": chip,
            "spill_bytes": 0,
            "seconds": seconds,
            "deeper": DEEPER,
            "flops_over_useful": USEFUL,
        }.get(key)
        figure = round(value, 3) if isinstance(value, float) else value
        record.figure(f"{name}.{row['target']}.{key}", figure, at_most=limit)
