"""Every preset fits its slice by the plan, and the plan's bytes are those of the compilers within a tenth.

Four parts:
- Each preset of the table in docs/which_preset.md is planned for its slice, with a KV cache for at least 64 rollouts of full
  length. The table has the plan's figures.
- The formulas are compared with the table of compiled train steps (scripts/compile_tier/memories.json): weights, moments,
  sums and temporaries of one device, at full depth, for models, slices and settings.
- Some of the table's cases are compiled again in the environment of the compile tier, and give the table's bytes.
- Qwen2.5-7B with a resident engine is refused on v5e-16. The command names a setting, and with it the run fits.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys

import compiled_memories
import compilers
import preset_table

from jaxrl_post.launch.plan import chips

MINUTES = 8.0
LIMIT_S = 1200
SOURCES = (
    "scripts/compilers.py",
    "scripts/preset_table.py",
    "scripts/compile_tier/memories.py",
    "scripts/compile_tier/memories.json",
    "configs",
)
ANSWERS = 64
WITHIN = 0.1
CASES = 30
AGAIN = (
    "qwen2_5_0_5b h100 1x1x1 T2048 full",
    "qwen2_5_7b 8xh100 1x8x1 T4096 full",
    "qwen3_32b 4x8xh100 1x32x1 T4096 full",
    "qwen2_5_0_5b v5e-1 1x1x1 T2048 full",
)
RESIDENT = ("engine.sleep=false", "optimizer.moments_dtype=float32", "optimizer.sums_dtype=float32")


def show(record) -> None:
    for one in preset_table.PRESETS:
        if one.overrides:
            continue
        where = chips.read(one.slice).times(one.count).name
        found = compiled_memories.preset(record.root / "configs" / "models" / one.config, where)
        key = f"{one.config.replace('.py', '')}.{where}"
        record.figure(f"{key}.word", found.word, equals="fits")
        record.figure(f"{key}.mib", found.most >> 20, at_most=found.room >> 20)
        record.figure(f"{key}.full_answers", found.answers, at_least=ANSWERS)
        record.figure(f"{key}.predicted_s", found.seconds)
    page = preset_table.PAGE.read_text()
    record.figure("page_of_presets_is_current", preset_table.filled(page) == page, equals=True)
    ratios = compiled_memories.ratios()
    for name, ratio in ratios.items():
        record.figure(f"predicted_over_compiled.{name}", round(ratio, 4), at_least=1 - WITHIN, at_most=1 + WITHIN)
    record.figure("num_cases", len(ratios), at_least=CASES)
    _again(record)
    _refused(record)


def _again(record) -> None:
    """Compiles some cases, and compares their bytes with the table's."""
    python = compilers.python(record.root, "fits")
    table = json.loads((record.root / "scripts/compile_tier/memories.json").read_text())
    for name in AGAIN:
        said = record.said("scripts/compile_tier/memories.py", "--print", name, timeout_s=LIMIT_S, python=python)
        found = json.loads(said.splitlines()[-1])[name]["accumulate"]
        told = table[name]["accumulate"]
        key = f"compiled_again.{name}"
        record.figure(f"{key}.arguments", found["arguments"], equals=told["arguments"])
        share = found["temporaries"] / told["temporaries"]
        record.figure(f"{key}.temporaries_over_table", round(share, 4), at_least=0.98, at_most=1.02)


def _refused(record) -> None:
    """Plans a resident engine, and then the setting that the refusal names."""

    def planned(*overrides: str) -> subprocess.CompletedProcess:
        flags = [f"--config.{one}" for one in overrides]
        file = "--config=configs/models/gsm8k_qwen2_5_7b.py:v5e-16"
        command = [sys.executable, "-m", "jaxrl_post.main", file, "--dry-run", "--slice=v5e-16", *flags]
        env = os.environ | {"JAX_PLATFORMS": "cpu"}
        return subprocess.run(command, cwd=record.root, text=True, capture_output=True, env=env, timeout=LIMIT_S)

    refused = planned(*RESIDENT)
    record.figure("resident_on_v5e_16.exit_code", refused.returncode, equals=1)
    said = refused.stderr.splitlines()[-1]
    record.figure("resident_on_v5e_16.said", said)
    record.figure("resident_on_v5e_16.named", "Qwen2.5-7B" in said and "v5e-16 does not fit" in said, equals=True)
    options = re.findall(r"--config\.(\S+)", said)
    record.figure("resident_on_v5e_16.options", options)
    record.figure("with_the_named_setting.exit_code", planned(*RESIDENT, *options).returncode, equals=0)
