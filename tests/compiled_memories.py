"""The plan beside the table of compiled train steps: what each preset needs, and predicted over compiled bytes."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from jaxrl_post.config import default, load, resolve
from jaxrl_post.launch.parts import build, inputs
from jaxrl_post.launch.plan import chips, roofline, slice_plan
from jaxrl_post.launch.plan.memory_plan import Kind
from jaxrl_post.models.presets import PRESETS

TABLE = Path(__file__).resolve().parents[1] / "scripts" / "compile_tier" / "memories.json"
LEARNS = (Kind.WEIGHTS, Kind.MOMENTS, Kind.GRADIENT, Kind.ACTIVATIONS)


@dataclass(frozen=True, kw_only=True)
class Preset:
    """The plan of a preset. `answers`: rollouts of full length that the KV caches of all replicas hold."""

    word: str
    most: int
    room: int
    answers: int
    seconds: dict[str, float]


def preset(file: Path, where: str) -> Preset:
    """Returns the plan of a config file with its choice, by the formulas."""
    config = resolve(load(str(file)))
    model, there = inputs.shape(config), chips.read(where)
    slice_plan.check_devices(config, there)
    found = slice_plan.plan(config, model, there)
    seconds = roofline.seconds(config, model, there, config.engine.max_length - config.sampling.max_tokens)
    return Preset(
        word=found.word,
        most=found.most,
        room=there.chip.memory,
        answers=config.replicas * config.pages * config.engine.page_size // config.engine.max_length,
        seconds={part: round(value, 3) for part, value in seconds.items()},
    )


def ratios(*names: str) -> dict[str, float]:
    """Returns predicted over compiled bytes of a device that learns, by case of the table: of these or of all.

    Moments are not in the gradient's program. They stand beside it, with the bytes of their shapes on both sides.
    """
    out = {}
    table = json.loads(TABLE.read_text())
    for name in names or table:
        case = table[name]
        config = resolve(default(), [f"model.preset={case['model']}", *case["options"]])
        chip = chips.read(case["slice"]).chip
        items = build.memory_of(
            config, PRESETS[case["model"]], generates=True, platform=chip.platform, flash=chip.flash
        )
        moments = sum(item.bytes for item in items if item.kind is Kind.MOMENTS)
        predicted = sum(item.bytes for item in items if item.kind in LEARNS)
        needs = [sum(bytes for part, bytes in case["accumulate"].items() if part != "cpu_s") + moments]
        if "commit" in case:
            needs.append(sum(bytes for part, bytes in case["commit"].items() if part != "cpu_s"))
        out[name] = predicted / max(needs)
    return out
