"""Minutes of every config that runs on a CPU as it is, one after another, each a whole run with an empty compilation cache.

    python scripts/bench.py configs --json scripts/results/configs.json [--only=demo,recipes/grpo]

Configs for accelerators (gsm8k_*, mbpp_*) are left out, and so is demo/sft with its 5,000
steps. The stories configs need the folder JAXRL_DATA.
"""

from __future__ import annotations

import re
import tempfile
from pathlib import Path

import trained

LEFT_OUT = (
    "gsm8k_qwen2_5_0_5b",
    "gsm8k_qwen2_5_7b",
    "gsm8k_qwen3",
    "mbpp_qwen2_5_coder",
    "demo/sft",
    "demo/distill",  # these begin with what another run left
    "demo/distill_start",
    "demo/opd",
    "demo/from_preferences",
)
DEVICES = re.compile(r"--xla_force_host_platform_device_count=(\d+)")


def bench(record) -> None:
    only = record.options.get("only", "")
    for file in sorted((record.root / "configs").glob("*.py")):
        if file.stem in LEFT_OUT or (only and file.stem not in only.split(",")):
            continue
        if file.stem.startswith("stories"):
            record.data("tinystories-260k")
        count = devices(file)
        with tempfile.TemporaryDirectory() as folder:
            forced = f"--xla_force_host_platform_device_count={count}"
            env = {"XLA_FLAGS": forced, "JAX_COMPILATION_CACHE_DIR": f"{folder}/cache"}
            seconds = trained.run(record, f"configs/{file.name}", Path(folder) / "run", timeout_s=3600, env=env)
        record.figure(f"{file.stem}.devices", count)
        record.figure(f"{file.stem}.minutes", round(seconds / 60, 1))


def devices(file: Path) -> int:
    """Returns how many devices the command in a config's docstring forces, else 1."""
    found = DEVICES.search(file.read_text(encoding="utf-8"))
    return int(found[1]) if found else 1
