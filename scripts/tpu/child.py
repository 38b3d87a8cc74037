"""Runs one section of scripts/tpu_check.py: `python scripts/tpu/child.py NAME PART TOLD SECONDS [small]`, as scripts/gpu/child.py."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable

from gpu import child, packed_rows, row_products, swap
from gpu.part import Part
from tpu import grouped, recurrent, small, training
from tpu.sections import SHARED

from jaxrl_post.kernels import flash_tpu, product_tpu
from jaxrl_post.models.presets import PRESETS

SWAPPED = ("qwen2_5_0_5b", *swap.NAMES)  # the first also where a chip has 16 GB
RUN: dict[str, Callable[[Part], None]] = {
    **{name: child.RUN[name] for name in SHARED},
    "packed_rows": functools.partial(packed_rows.against_reference, kernel=flash_tpu.attention),
    "packed_rows_times": functools.partial(packed_rows.times, kernel=flash_tpu.attention),
    "row_products": functools.partial(row_products.beside_library, kernel=product_tpu.product),
    "recurrent": recurrent.against_reference,
    "grouped": grouped.against_reference,
    "train": training.steps,
    "swap": functools.partial(swap.cast, models={name: PRESETS[name] for name in SWAPPED}),
}

if __name__ == "__main__":
    child.main(*sys.argv[1:], run=RUN, in_small=small.SECTIONS)
