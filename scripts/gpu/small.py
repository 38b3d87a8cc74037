"""The sections of scripts/gpu_check.py at sizes of a CPU: the same functions, kernels interpreted or plain jnp.

Nothing here is a measurement, and the result says so. What only a GPU has, such as its events or what its flags change,
is a figure NAME.absent with the reason. Each section is a process of its own, so constants of modules are set here.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import jax
from gpu import (
    decoding,
    device,
    drawing,
    equality,
    options,
    packed_rows,
    paged_attention,
    rl_runs,
    row_bits,
    row_products,
    swap,
    timeline,
    torch_decoding,
    torch_training,
    training,
    trl_steps,
)
from gpu.part import Part

from jaxrl_post.kernels import flash_gpu, product_gpu
from jaxrl_post.models.model_config import ModelConfig

NAME, POINTS = "tiny", ((3, 70), (4, 70))  # of the preset; rollouts, and tokens of each so far
MODEL = ModelConfig(
    vocab_size=1100, embed=16, layers=2, heads=2, kv_heads=1, head_dim=8, ffw=16, max_length=512, tied=True
)
WIDER = replace(MODEL, vocab_size=1104, head_dim=16)  # sides that the kernel of products serves
KERNEL = functools.partial(flash_gpu.attention, interpret=True, tiles=flash_gpu.square(16))
PRODUCT = functools.partial(product_gpu.product, interpret=True)
ROWS = dict(kernel=KERNEL, lengths=(32,), heads=(4, 2, 16))
TILES = {"forward": ((8, 16),), "by_queries": ((16, 16),), "by_keys": ((16, 8), (32, 16))}
RUN = (  # settings of whole runs
    "steps=3",
    "engine.slots=64",
    "engine.row_sizes=(64,)",
    "scheduler.prompts=4",
    "sampling.max_tokens=24",
    "batch.rows=2",
    "batch.tokens=256",
    "data.size=8",
    "optimizer.lr=0.01",
)


def run(name: str, part: Part, sections: Mapping[str, Callable[[Part], None]] | None = None) -> None:
    """Runs one section. sections: of another profile."""
    decoding.STEPS, training.PROMPT, training.ROWS = 2, 8, {64: 2}
    row_bits.CONTEXTS, timeline.DECODED, timeline.TOKENS = (12, 68), POINTS[:1], 64
    (sections or SECTIONS)[name](part)


def _timeline(part: Part) -> None:
    lacks(part, "timeline", "the profiler sees no GPU here: these are the events of XLA:CPU's threads, without graphs")
    right = timeline.recorded
    timeline.recorded = lambda work: right(work, "/host:CPU", "tf_XLA")
    timeline.of_both(part, MODEL, NAME)


def _flagged(name: str) -> Callable[[Part], None]:
    def under_flags(part: Part) -> None:
        lacks(part, name, "XLA:CPU reads these flags and obeys none: the program is the one without them")
        decoding.under_flags(part, name, NAME, MODEL, POINTS[:1])

    return under_flags


def _one_tile(part: Part) -> None:
    lacks(part, "row_bits_one_tile", "XLA:CPU reads these flags and obeys none: the products are those without them")
    row_bits.of_one_tile(part, {NAME: MODEL}, (4, 8))


def _drawing(part: Part) -> None:
    lacks(part, "sampling", "on a CPU the reference takes the kernel's place, so that it is compared with itself")
    drawing.against_reference(part, shapes=((4, 1100),))


def _paged_attention(part: Part) -> None:
    lacks(
        part, "paged_attention", "on a CPU the reference takes the kernel's place, so that it is compared with itself"
    )
    paged_attention.against_reference(part, shapes=((2, 100, 2),))


def lacks(part: Part, name: str, why: str) -> None:
    """Writes why a section shows nothing of a GPU, where there is none."""
    if jax.default_backend() != "gpu" and f"{name}.absent" not in part.figures:
        part.figure(f"{name}.absent", why)


def _steps(section: str) -> Callable[[Part], None]:
    return lambda part: training.steps(part, MODEL, {64: 2}, NAME, section)


PEER: dict[str, Any] = dict(name=NAME, model=MODEL, device="cpu")
SECTIONS: dict[str, Callable[[Part], None]] = {
    "device": lambda part: device.speed(part, numbers=1 << 12, width=16),
    "decode_1_5b": lambda part: decoding.decode(part, NAME, MODEL, batches=(3, 4), contexts=(70,)),
    "timeline": _timeline,
    "packed_rows": lambda part: packed_rows.against_reference(part, KERNEL, shapes=((2, 64, 4, 2, 16),)),
    "packed_rows_times": lambda part: packed_rows.times(part, **ROWS),
    "packed_rows_tiles": lambda part: packed_rows.tiles(
        part, TILES, 32, ROWS["heads"], flash_gpu.square(16), interpret=True
    ),
    **{name: _flagged(name) for name in decoding.UNDER_FLAGS},
    "row_bits_one_tile": _one_tile,
    **{name: _steps(name) for name in training.SETTINGS},
    "tokamax": lambda part: options.tokamax(part, **ROWS),
    "generate_eager": lambda part: torch_decoding.eager(part, points=POINTS, **PEER),
    "generate_compiled": lambda part: torch_decoding.compiled(part, points=POINTS, **PEER),
    "torch_train": lambda part: torch_training.steps(part, MODEL, NAME, 64, 4, "cpu"),
    "swap": lambda part: swap.cast(part, {NAME: MODEL}),
    "sampling": _drawing,
    "paged_attention": _paged_attention,
    "row_products": lambda part: row_products.beside_library(part, {NAME: WIDER}, (4, 8), PRODUCT),
    "decode_library": lambda part: decoding.under_flags(part, "decode_library", NAME, MODEL, POINTS[:1], "library"),
    "decode_fixed": lambda part: decoding.under_flags(part, "decode_fixed", NAME, MODEL, POINTS[:1], "fixed"),
    "row_bits": lambda part: row_bits.everywhere(part, {NAME: MODEL}, (4, 8)),
    "equality": lambda part: equality.candidates(part, 8, MODEL),
    "rl_same_bits": lambda part: rl_runs.same_bits(part, "stories260k", RUN),
    "rl_pipelined": lambda part: rl_runs.pipelined(part, "stories260k", RUN),
    "trl_steps": lambda part: trl_steps.steps(part, "stories260k", "cpu", prompts=2, samples=4, tokens=8),
    "decode_7b": lambda part: decoding.decode(part, "other", MODEL, batches=(3,), contexts=(70,)),
    "sampling_times": lambda part: drawing.times(part, rows_of=(4,), vocab=1100),
    "cudnn": lambda part: options.cudnn(part, **ROWS),
    "transformer_engine": lambda part: options.transformer_engine(part, **ROWS),
    "target": device.target,
    "paged_attention_times": lambda part: paged_attention.times(part, (2,), (100,), (0, 2)),
}
