"""Tokens per second of the row engine on random weights, beside the floor of the bytes that must be read."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from gpu import timing, weights
from gpu.equality import any_cost
from gpu.part import Part

from jaxrl_post.engine.row_engine import EngineSettings, RowEngine
from jaxrl_post.models import cache_kinds, decoder
from jaxrl_post.models.presets import PRESETS
from jaxrl_post.parallel import mesh
from jaxrl_post.ring.types import Prompt, Request, RolloutId, Sampling

PAGE = 64
BATCHES, CONTEXTS = (16, 64, 256), (1024, 4096)
STEPS, TURNS = 32, 3  # of a dispatch; dispatches that are timed
SPARE = 4 << 30  # bytes of logits, activations and compiled programs
UNDER_FLAGS = ("flags_while", "flags_concurrent", "flags_cublaslt", "flags_triton", "flags_one_tile")  # sections
FLAGGED = ((16, 1024), (256, 1024))  # rollouts, and tokens of each so far, that are timed under flags of XLA


def of_1_5b(part: Part) -> None:
    decode(part, "qwen2_5_1_5b", PRESETS["qwen2_5_1_5b"])


def of_7b(part: Part) -> None:
    decode(part, "qwen2_5_7b", PRESETS["qwen2_5_7b"])


def decode(
    part: Part,
    name: str,
    model: decoder.ModelConfig,
    *,
    batches: Sequence[int] = BATCHES,
    contexts: Sequence[int] = CONTEXTS,
    room: float | None = None,
) -> None:
    """Measures tokens per second of the engine as it runs, packing and reading included.

    Args:
      room: bytes of the device. None: as the device says.
    """
    weight_bytes = 2 * sum(x.size for x in jax.tree.leaves(decoder.abstract(model)))
    token_bytes = 2 * cache_kinds.held(model.kept)
    room = (timing.memory() if room is None else room) - weight_bytes - SPARE
    asked = [(batch, context) for context in contexts for batch in batches]
    fitting = [(b, c) for b, c in asked if b * pages(c) * PAGE * token_bytes <= room]
    wanted = [(b, c) for b, c in fitting if part.wants(_key(name, b, c), 8.0)]
    if f"decode.{name}.without_room" not in part.figures:
        part.figure(f"decode.{name}.without_room", [_key(name, *one) for one in asked if one not in fitting])
    if not wanted:
        return
    engine = filled_engine(model, weights.drawn(model), wanted)
    for batch, context in wanted:
        if not part.wants(_key(name, batch, context), 5.0):
            continue
        took = min(turns(engine, batch, context))
        read = weight_bytes + batch * context * token_bytes
        part.figure(
            _key(name, batch, context),
            {
                "tokens_per_s": batch * STEPS / took,
                "step_ms": 1e3 * took / STEPS,
                "floor_ms": 1e3 * read / part.bandwidth,
                "share_of_bandwidth": read * STEPS / part.bandwidth / took,
            },
        )


def under_flags(
    part: Part,
    section: str,
    name: str = "qwen2_5_1_5b",
    model: decoder.ModelConfig = PRESETS["qwen2_5_1_5b"],
    points: Sequence[tuple[int, int]] = FLAGGED,
    products: str = "auto",
) -> None:
    """Measures the same steps as `decode`, beside those as is: in a process that began with other flags of XLA, or by other products."""
    if f"{section}.flags" not in part.figures:
        part.figure(f"{section}.flags", os.environ.get("XLA_FLAGS", ""))
    keys = {point: f"{section}.{_key(name, *point).removeprefix('decode.')}" for point in points}
    wanted = [point for point, key in keys.items() if part.wants(key, 20.0)]
    if not wanted:
        return
    engine = filled_engine(model, weights.drawn(model), wanted, products)
    for point in wanted:
        step, as_is = 1e3 * min(turns(engine, *point)) / STEPS, part.told[_key(name, *point)]["step_ms"]
        part.figure(keys[point], {"step_ms": step, "longer_than_as_is_ms": step - as_is, "over_as_is": step / as_is})


def _key(name: str, batch: int, context: int) -> str:
    return f"decode.{name}.batch_{batch}_context_{context}"


def pages(context: int) -> int:
    """Returns the pages of a rollout that has `context` tokens at the start."""
    return -(-(context + (TURNS + 1) * STEPS + 1) // PAGE)


def filled_engine(
    model: decoder.ModelConfig, params: Any, wanted: Sequence[tuple[int, int]], products: str = "auto"
) -> RowEngine:
    """Returns a row engine for pairs of batch and context, which takes prompts as computed already.

    Their pages hold what was there before. The time of a step depends on lengths, not on values.
    """
    batches = tuple(sorted({batch for batch, _ in wanted}))
    settings = EngineSettings(
        slots=batches[-1],
        max_length=max(pages(context) for _, context in wanted) * PAGE,
        page_size=PAGE,
        pages=max(batch * pages(context) for batch, context in wanted),
        row_sizes=batches,
        head_rows=batches[-1],
        steps_per_dispatch=STEPS,
        refill_slots=1,
        dtype=jnp.bfloat16,
        products=products,
    )
    engine = RowEngine(model, params, mesh.make_mesh(), settings, cost=any_cost(batches))
    seat = engine.admission.seat

    def filled(replica, sequence, entry):
        out = seat(replica, sequence, entry)
        sequence.num_computed = sequence.shared
        return out

    engine.admission.seat = filled
    return engine


def turns(engine: RowEngine, batch: int, context: int) -> Iterator[float]:
    """Returns seconds of each timed dispatch: `batch` rollouts of `context` tokens so far, each of a prompt of its own."""
    noise, asked = np.random.default_rng(0), []
    for index in range(batch):
        prompt = Prompt(id=str(index), tokens=noise.integers(0, engine.vocab_size, context))
        id = RolloutId(0, "train", 0, prompt.id, 0)
        most = (TURNS + 1) * STEPS + 1
        asked.append(Request(rollout_id=id, prompt=prompt, seed=id.seed(), max_tokens=most, sampling=Sampling()))
    engine.reset()
    engine.row_sizes = (batch,)
    engine.submit(asked)
    engine.step()
    for _ in range(TURNS):
        begun, clock = time.perf_counter(), engine.clock
        engine.step()
        assert engine.clock == clock + STEPS, "a dispatch ended early: what was timed is not a full one"
        yield time.perf_counter() - begun
    engine.park([request.rollout_id for request in asked])
