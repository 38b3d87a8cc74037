"""Where the time of decoding and of training goes: kernels by name, launches, and time in which no kernel runs.

The device is recorded by jax's profiler, which slows a run a little. Times beside floors are those of `decode` and `train`.
A step's kernels stay in one CUDA graph, by the flag of the section (scripts/gpu/sections.py).
"""

from __future__ import annotations

import gc
import re
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
from gpu import decoding, training, weights
from gpu.part import Part

from jaxrl_post.models.decoder import ModelConfig
from jaxrl_post.models.presets import PRESETS

PRESET = "qwen2_5_1_5b"
DECODED = ((16, 1024), (256, 1024))  # rollouts, and tokens of each so far
TOKENS = 4096
KERNELS = 16  # that are named, those that take longest
PRODUCTS = re.compile("gemm|dot|nvjet|cutlass|cublas", re.IGNORECASE)  # in names of kernels that multiply matrices
PLANE, LINE = "/device:GPU", "Stream"  # of the profiler's data: a device, and one of its streams


class Event(NamedTuple):
    """One kernel or copy on a stream of the device. Times in milliseconds."""

    name: str
    start: float
    took: float

    @property
    def end(self) -> float:
        return self.start + self.took


def of_both(part: Part, model: ModelConfig = PRESETS[PRESET], preset: str = PRESET) -> None:
    """Records one dispatch of decoding at each size, and one optimizer step."""
    wanted = [one for one in DECODED if part.wants(_decoded(preset, *one), 30.0)]
    if wanted:
        engine = decoding.filled_engine(model, weights.drawn(model), wanted)
        for batch, context in wanted:
            turns = decoding.turns(engine, batch, context)
            next(turns)
            part.figure(_decoded(preset, batch, context), summary(recorded(turns.__next__), decoding.STEPS))
            list(turns)
        del engine, turns
        gc.collect()
    key = f"timeline.train.{preset}.{TOKENS}_tokens"
    if part.wants(key, 45.0):
        rows = training.ROWS[TOKENS]
        trainer = training.learner(model, preset, rows, TOKENS)
        sequences = training.groups(model, training.MICRO_BATCHES * rows, TOKENS)
        training.one_step(trainer, sequences)
        part.figure(key, summary(recorded(lambda: training.one_step(trainer, sequences)), training.MICRO_BATCHES))


def _decoded(preset: str, batch: int, context: int) -> str:
    return f"timeline.decode.{preset}.batch_{batch}_context_{context}"


def recorded(run: Callable[[], object], plane: str = PLANE, line: str = LINE) -> list[Event]:
    """Returns what the device did while `run` ran, which must wait for it.

    Raises:
      RuntimeError: the profiler saw nothing of the device.
    """
    quiet = jax.profiler.ProfileOptions()
    quiet.python_tracer_level = 0
    with tempfile.TemporaryDirectory() as folder:
        jax.profiler.start_trace(folder, profiler_options=quiet)
        try:
            run()
        finally:
            jax.profiler.stop_trace()
        (file,) = Path(folder).rglob("*.xplane.pb")
        data = jax.profiler.ProfileData.from_file(str(file))
        events = [
            Event(event.name, event.start_ns / 1e6, event.duration_ns / 1e6)
            for one in data.planes
            if one.name.startswith(plane)
            for stream in one.lines
            if stream.name.startswith(line)
            for event in stream.events
        ]
    if not events:
        raise RuntimeError(f"the profiler saw nothing on {plane}: {[one.name for one in data.planes]}")
    return events


def summary(events: Sequence[Event], turns: int) -> dict[str, Any]:
    """Returns counts and milliseconds of one turn, where `turns` were recorded."""
    kernels: dict[str, list[float]] = {}
    for event in events:
        kernels.setdefault(re.sub(r"([._]\d+)+$", "", event.name), []).append(event.took)
    busy, span = _covered(events), max(e.end for e in events) - min(e.start for e in events)
    longest = sorted(kernels.items(), key=lambda item: -sum(item[1]))[:KERNELS]
    return {
        "launches": len(events) / turns,
        "busy_ms": busy / turns,
        "idle_ms": (span - busy) / turns,
        "products_ms": sum(event.took for event in events if PRODUCTS.search(event.name)) / turns,
        "kernels": [{"name": name, "launches": len(took) / turns, "ms": sum(took) / turns} for name, took in longest],
    }


def _covered(events: Sequence[Event]) -> float:
    """Returns the milliseconds in which at least one event runs."""
    covered, end = 0.0, float("-inf")
    for event in sorted(events, key=lambda one: one.start):
        covered += max(0.0, event.end - max(event.start, end))
        end = max(end, event.end)
    return covered
