"""The environment of the compile tier: the vendors' compilers, apart from what a run installs."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from record import Missing

PROGRAMS = ("train", "rows", "swap")
CPU_S = 250  # of one program, at most
LIMIT_S = 1800


def python(root: Path, show: str) -> Path:
    """Makes the environment where it is missing, and returns its Python.

    Raises:
      Missing: it cannot be made, with what `make` said last.
    """
    made = subprocess.run(["make", ".venv-aot/installed.stamp"], cwd=root, text=True, capture_output=True)
    if made.returncode:
        said = (made.stdout + made.stderr)[-2000:]
        raise Missing(f"{show}: the environment of the compile tier was not made: {said}")
    return root / ".venv-aot" / "bin" / "python"


def told(record, python: Path, file: str, *words: str) -> dict:
    """Returns what a script of the compile tier says under these words: its last line, as JSON. It is kept as finished work."""

    def said() -> dict:
        return json.loads(record.said(file, *words, timeout_s=LIMIT_S, python=python).splitlines()[-1])

    return record.cached("-".join(words), said)


def whole_program(record, python: Path, *words: str) -> dict:
    """Returns what scripts/compile_tier/whole_programs.py says of a program."""
    return told(record, python, "scripts/compile_tier/whole_programs.py", *words)


def whole_programs(
    record, python: Path, models: Mapping[str, Sequence[str]], more: Callable[[str], Mapping[str, Mapping[str, Any]]]
) -> None:
    """Compiles each program of each model for its slices, and writes their figures.

    They are compiled one after another, because CPU seconds of a compiler grow beside other work.

    Args:
      models: the slices by model.
      more: of a program: further bounds by figure.
    """
    from jaxrl_post.models.presets import PRESETS

    named = [(one, model, where) for model, slices in models.items() for where in slices for one in PROGRAMS]

    for program, model, where in named:
        found = whole_program(record, python, program, model, where)
        layers = len(PRESETS[model].expert_layers) if program == "rows" else 1
        bounds = {
            "cpu_s": {"at_most": CPU_S},
            "memory_mib": {"at_most": found.pop("hbm_mib")},
            "dense_products": {"equals": 0},
            "kernels": {"at_least": 3 * layers},
            "through_host": {"equals": 0},
        } | more(program)
        for name, value in found.items():
            figure = round(value, 4) if isinstance(value, float) else value
            record.figure(f"{model}.{where}.{program}.{name}", figure, **bounds.get(name, {}))
