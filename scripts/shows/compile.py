"""Kernels, row program and train step compile for real for v5e, v6e, tpu7x and sm_90, without such a device.

Runs the second tier of tests (`make test-compile`, which makes its own environment) and writes its table. For every
program and target the table has the seconds of compilation, temporary memory with its analytic bound, and memory in
all. It also has the chip's memory, registers and spilled bytes. The row program has all 28 layers of Qwen2.5-7B. The
train step has 2, or 1 where a compiler takes minutes for each.
"""

from __future__ import annotations

import json
import re
import subprocess
import tempfile
import time
from pathlib import Path

from record import Missing

MINUTES = 10.0
LIMIT_S = 1800
SOURCES = ("scripts/compile_tier", "scripts/make_venv.sh")  # what `make test-compile` runs
TARGETS = ("sm_90", "tpu7x", "v5e", "v6e")


def show(record) -> None:
    made = subprocess.run(["make", ".venv-aot/installed.stamp"], cwd=record.root, text=True, capture_output=True)
    if made.returncode:
        raise Missing(
            f"compile: the environment of the compile tier was not made: {(made.stdout + made.stderr)[-2000:]}"
        )
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "table.json"
        start = time.monotonic()
        done = subprocess.run(
            ["make", "test-compile", f"ARGS=--table={file}"],
            cwd=record.root,
            text=True,
            capture_output=True,
            timeout=LIMIT_S,
        )
        record.figure("tier_s", round(time.monotonic() - start, 1), at_most=600)
        rows = json.loads(file.read_text()) if file.is_file() else []
    record.figure("tier_exit_code", done.returncode, equals=0)
    if done.returncode:
        print((done.stdout + done.stderr)[-4000:])
    for row in rows:
        _row(record, dict(row))
    for target in TARGETS:
        record.figure(f"num_compiled.{target}", sum(row["target"] == target for row in rows), at_least=8)
    record.figure("num_spilled_bytes", sum(row.get("spill_bytes") or 0 for row in rows), equals=0)


def _row(record, row: dict) -> None:
    name = re.sub(r"[^a-z0-9_]+", "_", row.pop("program").lower()).strip("_")
    bound, chip = row.get("temp_bound_mib"), row.get("hbm_mib")
    for key, value in row.items():
        if key == "target" or value == "":
            continue
        limit = {"temp_mib": bound, "total_mib": chip, "spill_bytes": 0}.get(key)
        figure = round(value, 3) if isinstance(value, float) else value
        record.figure(f"{name}.{row['target']}.{key}", figure, at_most=limit)
