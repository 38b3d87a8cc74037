"""Drafts on a model with recurrent states: fewer engine steps at equal bits, and states that a step reads once and writes once.

- drafts: configs/demo/hybrid.py's policy under configs/demo/speculation.py, with drafts and without. Steps with drafts are at most
  0.8 of those without.
- bytes: rows of a layer of Qwen3.5-9B, compiled for TPU v6e and sm_90 (scripts/compile_tier/recurrent.py). A step in which every
  slot repeats and drafts the largest number of rows is held against one with the same new rows and no repeated ones.

The planted fault is the loop in jnp, which moves states in every turn. The count must find its lines.
"""

from __future__ import annotations

import compilers
import learning

MINUTES = 12.0
PLATFORM = "cpu"
LIMIT_S = 900
SOURCES = (
    "scripts/compile_tier/recurrent.py",
    "scripts/compile_tier/targets.py",
    "scripts/compiled_text.py",
    "scripts/compilers.py",
    "scripts/traffic.py",
)
TARGETS = ("v6e", "sm_90")
HYBRID = "configs/demo/hybrid.py"
BOUNDS = {
    "lines_that_move_states": {"equals": 1},
    "in_place": {"equals": 1.0},
    "reads_of_a_state": {"equals": 1.0},
    "replayed_over_plain": {"at_most": 1.05},
}


def show(record) -> None:
    python = compilers.python(record.root, "hybrid-speculation")
    file = "scripts/compile_tier/recurrent.py"
    for target in TARGETS:
        for name, value in compilers.told(record, python, file, target).items():
            record.figure(f"{target}.{name}", round(value, 4), **BOUNDS.get(name, {}))
        planted = compilers.told(record, python, file, target, "planted")
        record.figure(f"{target}.planted_lines_that_move_states", planted["lines_that_move_states"], at_least=2)

    same = learning.recipe(record, HYBRID)
    found = record.cached("drafts", lambda: learning.drafts(record, *same, timeout_s=LIMIT_S))
    learning.drafts_save_steps(record, found, times=1.25)
