"""Minutes of every config that runs on a CPU as it is, one after another, each a whole run with an empty compilation cache.

    python scripts/bench.py configs --json scripts/results/configs.json [--only=demo,recipes/grpo]

Configs for accelerators (models/gsm8k_*, models/mbpp_*), simulations, and configs that begin with what another run left are
left out, and so is demo/sft with its 5,000 steps. The stories configs need the folder JAXRL_DATA.
"""

from __future__ import annotations

import re
import tempfile
from pathlib import Path

import trained

LEFT_OUT = re.compile(r"models/(gsm8k|mbpp)_\w+|sim/\w+|own/\w+|demo/(sft|distill|distill_start|opd|from_preferences)")
DEVICES = re.compile(r"--xla_force_host_platform_device_count=(\d+)")


def bench(record) -> None:
    only = record.options.get("only", "")
    for file in sorted((record.root / "configs").rglob("*.py")):
        name = file.relative_to(record.root / "configs").with_suffix("").as_posix()
        if LEFT_OUT.fullmatch(name) or (only and name not in only.split(",")):
            continue
        if file.stem.startswith("stories"):
            record.data("tinystories-260k")
        count = devices(file)
        with tempfile.TemporaryDirectory() as folder:
            forced = f"--xla_force_host_platform_device_count={count}"
            env = {"XLA_FLAGS": forced, "JAX_COMPILATION_CACHE_DIR": f"{folder}/cache"}
            seconds = trained.run(record, f"configs/{name}.py", Path(folder) / "run", timeout_s=3600, env=env)
        record.figure(f"{name}.devices", count)
        record.figure(f"{name}.minutes", round(seconds / 60, 1))


def devices(file: Path) -> int:
    """Returns how many devices the command in a config's docstring forces, else 1."""
    found = DEVICES.search(file.read_text(encoding="utf-8"))
    return int(found[1]) if found else 1
