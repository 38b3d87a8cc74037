"""New weights for an engine that holds them in bfloat16, beside a plain cast and the bytes at the bandwidth of a copy."""

from __future__ import annotations

import gc
import statistics
import time

import jax
import jax.numpy as jnp
from gpu import timing, weights
from gpu.decoding import PAGE, SPARE
from gpu.equality import any_cost
from gpu.part import Part

from jaxrl_post.engine.row_engine import EngineSettings, RowEngine
from jaxrl_post.models import decoder
from jaxrl_post.models.presets import PRESETS
from jaxrl_post.parallel import mesh as meshes

TURNS = 5
NAMES = ("qwen2_5_1_5b", "qwen2_5_7b")


def cast(part: Part, models: dict[str, decoder.ModelConfig] | None = None, room: float | None = None) -> None:
    """Times `engine.swap` of float32 weights, its checks included.

    Args:
      room: bytes of the device. None: as the device says.
    """
    room = timing.memory() if room is None else room
    for name, model in (models or {name: PRESETS[name] for name in NAMES}).items():
        key, count = f"swap.{name}", sum(x.size for x in jax.tree.leaves(decoder.abstract(model)))
        if not part.wants(key, 30.0):
            continue
        if 8 * count + SPARE > room:  # 4 bytes of the learner, 2 of the engine, 2 of the plain cast
            part.figure(key, {"without_room_gib": (8 * count + SPARE) / 2**30})
            continue
        part.figure(key, timed(model, count, part.bandwidth))
        gc.collect()  # its weights, before the next one's


def timed(model: decoder.ModelConfig, count: int, bandwidth: float) -> dict[str, float]:
    """Returns medians of seconds. Bytes are those that a cast reads and writes.

    In `swap_s` the engine reads the weights once more, to check them. In `with_flag_s` it is told that they are finite, as the
    learner's commit tells it."""
    mesh = meshes.make_mesh()
    new = weights.drawn(model, jnp.float32, meshes.param_shardings(mesh, decoder.axes(model), "learner"))
    settings = EngineSettings(
        slots=8,
        max_length=4 * PAGE,
        page_size=PAGE,
        pages=32,
        row_sizes=(8,),
        head_rows=8,
        steps_per_dispatch=1,
        refill_slots=1,
        dtype=jnp.bfloat16,
    )
    engine = RowEngine(model, new, mesh, settings, cost=any_cost((8,)))
    assert engine.device.case == "cast", engine.device.case
    took: dict[bool, list[float]] = {False: [], True: []}
    for version in range(1, 2 * (TURNS + 1) + 1):
        told = version % 2 == 0
        begun = time.perf_counter()
        engine.swap(new, version, jnp.asarray(True) if told else None)
        jax.block_until_ready(engine.device.params)
        took[told].append(time.perf_counter() - begun)
    plain = timing.seconds(jax.jit(lambda tree: jax.tree.map(lambda x: x.astype(jnp.bfloat16), tree)), new, turns=1)
    swap, with_flag = (statistics.median(some[1:]) for some in took.values())
    return {
        "swap_s": swap,
        "gb_per_s": 6 * count / swap / 1e9,
        "with_flag_s": with_flag,
        "plain_cast_s": plain,
        "floor_s": 6 * count / bandwidth,
        "share_of_bandwidth": 6 * count / bandwidth / swap,
    }
