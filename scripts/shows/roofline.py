"""Floors beside the vendors' compilers, for Qwen2.5-7B on four targets: decode, prefill, train step and weight sync.

Every part is compiled at full depth in the environment of the compile tier (scripts/compile_tier/roofline.py says what
each floor is). A ratio may not rise by more than SLACK above the committed results, so a regression fails.
"""

from __future__ import annotations

import json
from pathlib import Path

import compilers
from record import ROOT

MINUTES = 25.0
LIMIT_S = 1800
SOURCES = (
    "scripts/compile_tier/roofline.py",
    "scripts/compile_tier/test_programs.py",
    "scripts/compile_tier/test_train.py",
    "scripts/collectives.py",
    "scripts/compiled_text.py",
    "scripts/compilers.py",
    "scripts/traffic.py",
    "scripts/kernel_costs.py",
)
PARTS = ("decode", "prefill", "publish", "train")
TARGETS = ("sm_90", "tpu7x", "v5e", "v6e")
# Bounds of the issue: bytes of a step over weights and KV; a prompt's KV over that of rows read one by one; FLOPs.
BOUNDS = {"decode.compiled_over_floor": 1.15, "prefill.kv_over_one_by_one": 1 / 8, "train.flops_over_useful": 1.35}
SLACK = 1.02


def show(record) -> None:
    python = compilers.python(record.root, "roofline")
    before = _before()
    for part in PARTS:
        for target in TARGETS:
            for name, value in _compiled(record, python, part, target).items():
                key = f"{part}.{target}.{name}"
                bounds = [
                    BOUNDS.get(f"{part}.{name}"),
                    SLACK * before[key] if "_over_" in name and key in before else None,
                ]
                record.figure(
                    key, round(value, 4), at_most=min((one for one in bounds if one is not None), default=None)
                )


def _compiled(record, python: Path, part: str, target: str) -> dict[str, float]:
    said = record.said("scripts/compile_tier/roofline.py", part, target, timeout_s=LIMIT_S, python=python)
    found = json.loads(said.splitlines()[-1])
    return {name: value for name, value in found.items() if name not in ("part", "target")}


def _before() -> dict[str, float]:
    """Returns the committed figures, or none before the first run."""
    file = ROOT / "scripts" / "results" / "roofline.json"
    return json.loads(file.read_text())["figures"] if file.is_file() else {}
