"""Whole runs of RL on one device, measured beside predicted: `python scripts/rl_check.py [--model DIR] [--json FILE]`.

Shapes: Qwen2.5-0.5B, Qwen2.5-1.5B and Qwen3-1.7B, with random weights and prompts of GSM8K's lengths. Each runs in four modes
at equal rollouts: synchronous rounds, tail batching, a pipeline, and drafts. `--model DIR` runs real weights on GSM8K instead.

The table has seconds by phase and times as fast as synchronous rounds, with what plan and simulator predict of the same
lengths beside them. Tokens a second, and where device time went, are in each run's figures too.

FILE is scripts/results/rl-check.json unless given. Options, resume and exit codes are those of scripts/gpu_check.py. A call
ends after 560 s, or as `--seconds` says, and a later one goes on. For each shape it writes NAME-costs-SHAPE.json beside FILE.
That is the cost table that the runs measured, with date and device. Named in engine.cost_table, it corrects the decisions
and the predictions of later runs.

`--small` runs a tiny shape on a CPU, which measures nothing.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import sys
from pathlib import Path

import gpu_check
from record import write_json
from rl import arms
from rl.sections import REAL, RL, SHAPES, TINY, table


def main(argv: list[str]) -> int:
    """Runs what the arguments ask for, writes the corrections, and returns the exit code of gpu_check.main."""
    own = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    own.add_argument("--model", type=Path)
    told, rest = own.parse_known_args(argv)
    shapes, profile = (TINY,) if "--small" in rest else SHAPES, RL
    if told.model:
        if not (told.model / "config.json").is_file():
            print(f"--model={told.model}: no folder of weights, it has no config.json", file=sys.stderr)
            return 2
        os.environ[arms.MODEL] = str(told.model.resolve())
        shapes = (REAL,)
        profile = dataclasses.replace(RL, belongs={"model": told.model.name})
    profile = dataclasses.replace(profile, table=table(shapes))
    code = gpu_check.main(rest, profile=profile)
    options = gpu_check.arguments(rest, profile.table, profile)
    if not options.show and options.json.is_file():
        for file in corrections(options.json):
            print(f"cost table: {file.name}, for engine.cost_table", flush=True)
    return code


def corrections(result: Path) -> list[Path]:
    """Writes the cost tables of a result beside it, and returns their files."""
    out = []
    for key, value in json.loads(result.read_text())["figures"].items():
        if key.endswith(".costs"):
            file = result.with_name(f"{result.stem}-costs-{key.removesuffix('.costs')}.json")
            write_json(file, value)
            out.append(file)
    return out


if __name__ == "__main__":
    gpu_check.end_with_sections()
    sys.exit(main(sys.argv[1:]))
