"""Minutes of every config that runs on a CPU as it is, one after another, each a whole run with an empty compilation cache.

    python scripts/bench.py configs --json scripts/results/configs.json [--only=demo,own]

Configs for accelerators (gsm8k_*, mbpp_*) are left out, and so is demo_sft with its 5,000 steps. The stories configs need the
folder JAXRL_DATA.
"""

from __future__ import annotations

import re
import tempfile
from pathlib import Path

LEFT_OUT = (
    "gsm8k_qwen2_5_0_5b",
    "gsm8k_qwen2_5_7b",
    "gsm8k_qwen3",
    "mbpp_qwen2_5_coder",
    "demo_sft",
    "demo_distill",  # these begin with what another run left
    "demo_distill_start",
    "demo_opd",
    "demo_from_preferences",
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
            seconds = record.run(
                "-m",
                "jaxrl_post.main",
                f"--config=configs/{file.name}",
                f"--run-dir={folder}/run",
                timeout_s=3600,
                env={
                    "XLA_FLAGS": f"--xla_force_host_platform_device_count={count}",
                    "JAX_COMPILATION_CACHE_DIR": f"{folder}/cache",
                },
            )
        record.figure(f"{file.stem}.devices", count)
        record.figure(f"{file.stem}.minutes", round(seconds / 60, 1))


def devices(file: Path) -> int:
    """Returns how many devices the command in a config's docstring forces, else 1."""
    found = DEVICES.search(file.read_text(encoding="utf-8"))
    return int(found[1]) if found else 1
