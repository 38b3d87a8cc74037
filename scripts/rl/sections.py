"""The sections of scripts/rl_check.py: each shape in each mode, and then the correction of its cost table."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from gpu.expected import Expected
from gpu.part import Part
from gpu.sections import Profile, Section
from rl import arms, costs
from rl.arms import Shape

from jaxrl_post.parallel import devices

ROOT = Path(__file__).resolve().parents[2]
SHAPES = tuple(Shape(name=name, preset=name) for name in ("qwen2_5_0_5b", "qwen2_5_1_5b", "qwen3_1_7b"))
REAL = Shape(name="real", preset="")  # that of the weights
TINY = Shape(
    name="tiny",
    preset="stories260k",
    options=(
        "steps=5",
        "model.compute_dtype=float32",
        "model.remat=false",
        "engine.dtype=float32",
        "engine.slots=16",
        "engine.max_length=64",
        "engine.page_size=16",
        "engine.row_sizes=(16,32)",
        "engine.steps_per_dispatch=8",
        "engine.refill_slots=4",
        "sampling.max_tokens=32",
        "scheduler.prompts=4",
        "scheduler.group_size=4",
        "batch.rows=2",
        "batch.tokens=128",
        "batch.head_chunk=128",
    ),
    made=(8, 16, 30),
)
PARTS = ("step_s", "gen_s", "update_actor_s", "update_weights_s", "times_as_fast_as_sync")


def table(shapes: Sequence[Shape]) -> tuple[Section, ...]:
    """Returns the sections of shapes. Each waits for the synchronous run of its shape."""
    out: list[Section] = []
    for shape in shapes:
        for mode in arms.MODES:
            after = "" if mode == "sync" else f"{shape.name}_sync"
            out.append(Section(name=f"{shape.name}_{mode}", needs_s=120, limit_s=arms.LIMIT_S + 600, after=after))
        out.append(Section(name=f"{shape.name}_costs", needs_s=10, limit_s=60, after=f"{shape.name}_tail_batching"))
    return tuple(out)


def functions(shapes: Sequence[Shape]) -> dict[str, Callable[[Part], None]]:
    """Returns what each section of the shapes runs."""
    out: dict[str, Callable[[Part], None]] = {}
    for shape in shapes:
        for mode in arms.MODES:
            out[f"{shape.name}_{mode}"] = functools.partial(arms.run, shape=shape, mode=mode)
        out[f"{shape.name}_costs"] = functools.partial(costs.correct, shape=shape)
    return out


def why_not(seen: Mapping[str, Any]) -> str:
    """Returns the sentence of the refusal, or nothing."""
    if seen["platform"] in ("gpu", "tpu") and devices.of(seen["kind"]).known:
        return ""
    return (
        f"rl_check needs a GPU or TPU of the table of devices, and jax sees {seen['count']} x {seen['kind']} "
        f"({seen['platform']}); run it on one, or with --small --json=FILE on a CPU, where no figure is a measurement"
    )


def predictions(kind: str, figures: Mapping[str, Any]) -> dict[str, Expected]:
    """Returns what was predicted of each run, so that it stands beside what was measured."""
    out = {}
    for key, value in figures.items():
        if key.endswith(".predicted"):
            run = key.removesuffix(".predicted")
            out |= {f"{run}/{part}": Expected(value[part], value[part], "predicted") for part in PARTS}
    return out


RL = Profile(
    name="rl_check",
    file=ROOT / "scripts" / "rl_check.py",
    table=table(SHAPES),
    child=ROOT / "scripts" / "rl" / "child.py",
    why_not=why_not,
    expected=predictions,
    about="Whole runs of RL on one device: measured beside predicted.",
)
