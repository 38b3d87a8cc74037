"""Train steps on all chips of a host, by the learner of a run: of the largest preset whose weights and moments fit there."""

from __future__ import annotations

from collections.abc import Mapping

import jax
from gpu import timing, training
from gpu.decoding import SPARE
from gpu.part import Part

from jaxrl_post.models import decoder
from jaxrl_post.models.presets import PRESETS

NAMES = ("qwen2_5_1_5b", "qwen2_5_0_5b")  # the first that fits
HELD = 20  # bytes a weight: it, two moments, a sum and a new gradient in float32


def steps(
    part: Part,
    models: Mapping[str, decoder.ModelConfig] | None = None,
    shapes: Mapping[int, int] = training.ROWS,
    room: float | None = None,
) -> None:
    """Times optimizer steps as gpu_check does, with weights and rows divided over the chips.

    Args:
      models: by name, the largest first. shapes: tokens of a row, and rows of a micro-batch at least.
      room: bytes of a chip. None: as the device says.
    """
    chips, room = of_host(), timing.memory() if room is None else room
    models = models or {name: PRESETS[name] for name in NAMES}
    fitting = [name for name, model in models.items() if HELD * _weights(model) / chips + SPARE <= room]
    if "train.chips" not in part.figures:
        part.figure("train.chips", chips)
        part.figure("train.without_room", [name for name in models if name not in fitting])
    if fitting:
        rows = {tokens: -(-count // chips) * chips for tokens, count in shapes.items()}
        training.steps(part, models[fitting[0]], rows, fitting[0], chips=chips)


def of_host() -> int:
    """Returns the largest power of two of the chips that jax sees."""
    return 1 << (len(jax.devices()).bit_length() - 1)


def _weights(model: decoder.ModelConfig) -> int:
    return sum(x.size for x in jax.tree.leaves(decoder.abstract(model)))
