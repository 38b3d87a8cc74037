"""Prints the tables of docs/which_preset.md: what each preset holds and takes, both predicted, and the kinds of devices.

    python scripts/preset_table.py            prints the tables
    python scripts/preset_table.py --write    writes them into the page, between marks

Invariant: the figures are those that `--dry-run --slice=NAME` prints without a compiler, so no device is asked for.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "which_preset.md"
MARKS = ("<!-- presets:begin -->", "<!-- presets:end -->"), ("<!-- kinds:begin -->", "<!-- kinds:end -->")


@dataclass(frozen=True, kw_only=True)
class Preset:
    """A config of configs/models/ with its choice and overrides, and the slice that it is for; `count` slices or machines."""

    config: str
    slice: str
    count: int = 1
    overrides: tuple[str, ...] = ()


PRESETS = (
    Preset(config="gsm8k_qwen2_5_0_5b.py:t4", slice="t4"),
    Preset(config="gsm8k_qwen2_5_0_5b.py:l4", slice="l4"),
    Preset(config="gsm8k_qwen2_5_0_5b.py:v5e-1", slice="v5e-1"),
    Preset(config="gsm8k_qwen2_5_0_5b.py", slice="h100"),
    Preset(config="gsm8k_qwen2_5_7b.py:8xh100", slice="8xh100"),
    Preset(config="gsm8k_qwen2_5_7b.py:v5e-16", slice="v5e-16"),
    Preset(config="gsm8k_qwen2_5_7b.py", slice="v6e-16"),
    Preset(config="gsm8k_qwen3.py", slice="v6e-16"),
    Preset(
        config="gsm8k_qwen3.py", slice="v6e-32", count=2, overrides=("mesh.data=2", "mesh.fsdp=32", "batch.rows=64")
    ),
    Preset(config="gsm8k_qwen3.py:32b-v5p-64", slice="v5p-64"),
    Preset(config="gsm8k_qwen3.py:32b-4x8xh100", slice="8xh100", count=4),
    Preset(config="gsm8k_qwen3.py:30b-a3b-v5p-64", slice="v5p-64"),
    Preset(config="gsm8k_qwen3.py:30b-a3b-v6e-64", slice="v6e-64"),
    Preset(config="gsm8k_qwen3.py:30b-a3b-2x8xh100", slice="8xh100", count=2),
    Preset(config="long_qwen3.py", slice="v5p-16"),
    Preset(config="long_qwen3.py:8b-8xh100", slice="8xh100"),
    Preset(config="long_qwen3.py:32b-v5p-128", slice="v5p-128"),
    Preset(config="long_qwen3.py:32b-8x8xh100", slice="8xh100", count=8),
    Preset(config="gsm8k_qwen3_5.py:0.8b-t4", slice="t4"),
    Preset(config="gsm8k_qwen3_5.py:0.8b-l4", slice="l4"),
    Preset(config="gsm8k_qwen3_5.py:0.8b-v5e-1", slice="v5e-1"),
    Preset(config="gsm8k_qwen3_5.py:0.8b-h100", slice="h100"),
    Preset(config="gsm8k_qwen3_5.py", slice="v6e-16"),
    Preset(config="gsm8k_qwen3_5.py:9b-v5p-16", slice="v5p-16"),
    Preset(config="gsm8k_qwen3_5.py:9b-8xh100", slice="8xh100"),
    Preset(config="gsm8k_qwen3_5.py:35b-a3b-v6e-16", slice="v6e-16"),
    Preset(config="gsm8k_qwen3_5.py:35b-a3b-8xh100", slice="8xh100"),
    Preset(config="gsm8k_qwen3_5.py:35b-a3b-v6e-64", slice="v6e-64"),
    Preset(config="gsm8k_qwen3_5.py:35b-a3b-v5p-64", slice="v5p-64"),
    Preset(config="gsm8k_qwen3_5.py:35b-a3b-2x8xh100", slice="8xh100", count=2),
    Preset(config="gsm8k_gemma4.py:e2b-t4", slice="t4"),
    Preset(config="gsm8k_gemma4.py:e2b-l4", slice="l4"),
    Preset(config="gsm8k_gemma4.py:e2b-v5e-1", slice="v5e-1"),
    Preset(config="gsm8k_gemma4.py:e4b-v6e-1", slice="v6e-1"),
    Preset(config="gsm8k_gemma4.py:e4b-v5p-8", slice="v5p-8"),
    Preset(config="gsm8k_gemma4.py:e4b-h100", slice="h100"),
    Preset(config="gsm8k_gemma4.py", slice="v6e-16"),
    Preset(config="gsm8k_gemma4.py:31b-v5p-64", slice="v5p-64"),
    Preset(config="gsm8k_gemma4.py:31b-8xh100", slice="8xh100"),
    Preset(config="gsm8k_gpt_oss.py", slice="8xh100"),
    Preset(config="gsm8k_gpt_oss.py:v6e-16", slice="v6e-16"),
)


def table(presets: Sequence[Preset] = PRESETS) -> str:
    """Returns the table as Markdown."""
    rows = [("devices", "config", "model", "mesh", "mode", "memory of a device", "seconds a step, predicted")]
    rows += [("---",) * len(rows[0]), *(_row(one) for one in presets)]
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def _row(preset: Preset) -> tuple[str, ...]:
    from jaxrl_post.config import load, resolve
    from jaxrl_post.launch.parts import inputs
    from jaxrl_post.launch.plan import chips, roofline, slice_plan

    where = chips.read(preset.slice).times(preset.count)
    given = load(str(ROOT / "configs" / "models" / preset.config))
    config = resolve(given, preset.overrides, platform=where.chip.platform)
    model, m = inputs.shape(config), config.mesh
    found = slice_plan.plan(config, model, where)
    seen, prompt = slice_plan.lengths(config), config.engine.max_length - config.sampling.max_tokens
    predicted = roofline.seconds(config, model, where, prompt, seen.told["mean"])["all"]
    step = slice_plan.step_seconds(config, model, where, predicted, seen).step_s
    replicas = f"{config.replicas} replicas of {m.replica}" if config.replicas > 1 else "1 replica"
    parts = {"expert": m.expert, "context": m.context}
    more = "".join(f"{' x' if name == 'expert' else ','} {name} {size}" for name, size in parts.items() if size > 1)
    sleeps = ", the engine sleeps" if config.engine.sleep else ""
    changes = "".join(f" `--config.{one}`" for one in preset.overrides)
    return (
        f"`{where.name}`",
        f"`configs/models/{preset.config}`{changes}",
        Path(config.model.path).name,
        f"data {m.data} x fsdp {m.fsdp}{more}, {replicas}",
        f"{config.scheduler.name}{sleeps}",
        f"{found.most / 2**30:.1f} of {where.chip.memory / 2**30:.1f} GiB",
        f"{step:.0f}",
    )


def kinds() -> str:
    """Returns the devices that a plan knows, as Markdown."""
    from jaxrl_post.launch.plan import chips

    rows = [("kind", "reported as", "memory", "dense bfloat16", "memory bandwidth"), ("---",) * 5]
    for name, one in chips.KINDS.items():
        units = "" if one.bfloat16 else " (float32)"
        rows.append(
            (
                f"`{name}`",
                one.reported,
                f"{one.memory / 2**30:.0f} GiB",
                f"{one.flops / 1e12:.4g} TFLOP/s{units}",
                f"{one.bandwidth / 1e9:.0f} GB/s",
            )
        )
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def filled(page: str) -> str:
    """Returns the page with the tables between their marks."""
    for (begin, end), text in zip(MARKS, (table(), kinds()), strict=True):
        before, _, rest = page.partition(begin)
        page = f"{before}{begin}\n{text}\n{end}{rest.partition(end)[2]}"
    return page


def main(arguments: Sequence[str]) -> int:
    sys.path.insert(0, str(ROOT))
    if list(arguments) == ["--write"]:
        PAGE.write_text(filled(PAGE.read_text()))
    else:
        print(table(), kinds(), sep="\n\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
