"""Runs one section of scripts/gpu_check.py: `python scripts/gpu/child.py NAME PART TOLD SECONDS [small]`.

PART is the file of its figures, TOLD one of all others'. Work may begin within SECONDS. `small`: at sizes of a CPU.
"""

from __future__ import annotations

import functools
import json
import os
import sys
from collections.abc import Callable, Mapping
from pathlib import Path

from gpu import (
    decoding,
    device,
    drawing,
    equality,
    held,
    options,
    packed_rows,
    paged_attention,
    rl_runs,
    row_bits,
    row_products,
    small,
    swap,
    timeline,
    torch_decoding,
    torch_training,
    training,
    trl_steps,
)
from gpu.part import Part

from jaxrl_post.launch import compile_guard

RUN = {
    "device": device.speed,
    "sampling": drawing.against_reference,
    "paged_attention": paged_attention.against_reference,
    "packed_rows": packed_rows.everywhere,
    "row_bits": row_bits.everywhere,
    "equality": equality.candidates,
    "decode_1_5b": decoding.of_1_5b,
    "decode_7b": decoding.of_7b,
    **{name: functools.partial(training.steps, section=name) for name in training.SETTINGS},
    **{name: functools.partial(decoding.under_flags, section=name) for name in decoding.UNDER_FLAGS},
    "row_bits_one_tile": row_bits.of_one_tile,
    "row_products": row_products.beside_library,
    "decode_library": functools.partial(decoding.under_flags, section="decode_library", products="library"),
    "decode_fixed": functools.partial(decoding.under_flags, section="decode_fixed", products="fixed"),
    "tokamax": options.tokamax,
    "generate_eager": torch_decoding.eager,
    "generate_compiled": torch_decoding.compiled,
    "torch_train": torch_training.steps,
    "trl_steps": trl_steps.steps,
    "swap": swap.cast,
    "timeline": timeline.of_both,
    "rl_same_bits": rl_runs.same_bits,
    "rl_pipelined": rl_runs.pipelined,
    "packed_rows_times": packed_rows.every_time,
    "packed_rows_tiles": packed_rows.tiles,
    "sampling_times": drawing.times,
    "cudnn": options.cudnn,
    "transformer_engine": options.transformer_engine,
    "target": device.target,
    "paged_attention_times": paged_attention.times,
}


def main(
    name: str,
    file: str,
    told: str,
    seconds: str,
    sizes: str = "",
    *,
    run: Mapping[str, Callable[[Part], None]] = RUN,
    in_small: Mapping[str, Callable[[Part], None]] = small.SECTIONS,
) -> None:
    """Runs the section `name` of `run`, or at sizes of a CPU that of `in_small`."""
    held.follow(os.environ)
    compile_guard.use_cache(os.environ)
    part = Part(Path(file), json.loads(Path(told).read_text()), float(seconds))
    (functools.partial(small.run, name, sections=in_small) if sizes == "small" else run[name])(part)


if __name__ == "__main__":
    main(*sys.argv[1:])
