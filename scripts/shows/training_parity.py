"""Gradients of every way to train are those of an independent implementation, per leaf, and planted faults are found.

Each part is a module of scripts/training_parity/. Distances are relative 2-norms per leaf, before the optimizer, of the
learner in float32 from the other side in float64. `--parts=ppo,remax` chooses some.
"""

from __future__ import annotations

import importlib
import os
import sys

MINUTES = 4.0
PARTS = ("ppo", "remax", "gmpo", "dppo", "terms", "lora", "masks", "dpo", "reward_model", "distillation")

os.environ.setdefault("JAX_PLATFORMS", "cpu")


def show(record) -> None:
    sys.path[:0] = [str(record.root), str(record.root / "tests"), str(record.root / "scripts")]
    for name in record.options.get("parts", ",".join(PARTS)).split(","):
        importlib.import_module(f"training_parity.{name}").show(record)
