"""Products whose bits do not depend on the number of rows, beside the library's: times at each number of rows, and bits.

A product of ours becomes the default only where it takes at most 1.05 of the library's time. `layer_over_library` is that of all
products of a layer together, `bits_equal` whether each number of rows has the bits of the most.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from gpu import packed_rows, row_bits, timing
from gpu.part import Part

from jaxrl_post.kernels import product_gpu
from jaxrl_post.models.model_config import ModelConfig
from jaxrl_post.models.presets import PRESETS

NAMES, ROWS = ("qwen2_5_1_5b", "qwen2_5_7b"), (16, 32, 64, 128, 256)
IN_LAYER = {"q": 1, "kv": 2, "o": 1, "up": 2, "down": 1}  # products of a layer by shape


def beside_library(
    part: Part,
    models: Mapping[str, ModelConfig] | None = None,
    rows: Sequence[int] = ROWS,
    kernel: Callable = product_gpu.product,
) -> None:
    """Times each product of a layer and of the head, and compares bits over the numbers of rows."""
    for name, model in (models or {name: PRESETS[name] for name in NAMES}).items():
        for what, sides in row_bits.shapes(model).items():
            key = f"row_products.{name}.{what}"
            if part.wants(f"{key}.bits_equal", 6.0):
                _one(part, key, what, sides, rows, kernel)
        key = f"row_products.{name}.layer_over_library"
        if part.wants(key, 0.0):
            times = {what: part.figures[f"row_products.{name}.{what}.times"] for what in IN_LAYER}
            part.figure(key, {f"{size}_rows": _over(times, f"{size}_rows") for size in rows})


def _over(times: Mapping[str, Mapping[str, Mapping[str, float]]], size: str) -> float:
    """Returns the time of all products of a layer over the library's."""
    ours = {what: IN_LAYER[what] * one[size]["ms"] for what, one in times.items()}
    return sum(ours.values()) / sum(ours[what] / one[size]["over_library"] for what, one in times.items())


def _one(part: Part, key: str, what: str, sides: tuple[int, int], rows: Sequence[int], kernel: Callable) -> None:
    """Writes times beside the library's by number of rows, how far the values are apart, and whether bits are equal."""
    dtype = jnp.float32 if what == "head" else jnp.bfloat16
    x = jax.random.normal(jax.random.key(5), (max(rows), sides[0]), jnp.bfloat16)
    w = jax.random.normal(jax.random.key(6), sides, jnp.bfloat16)
    ours = jax.jit(functools.partial(kernel, dtype=dtype))
    library = jax.jit(functools.partial(jnp.matmul, preferred_element_type=dtype))
    took = {size: tuple(timing.seconds(run, x[:size], w) for run in (ours, library)) for size in rows}
    floor = 2 * sides[0] * sides[1] / part.bandwidth
    part.figure(
        f"{key}.times",
        {
            f"{size}_rows": {"ms": 1e3 * a, "over_library": a / b, "over_floor": a / floor}
            for size, (a, b) in took.items()
        },
    )
    whole, plain = (np.asarray(run(x, w), np.float32) for run in (ours, library))
    part.figure(f"{key}.difference", float(np.abs(whole - plain).max() / np.abs(plain).max()), at_most=2**-7)
    equal = [packed_rows.same_bits([ours(x, w)[:size]], [ours(x[:size], w)]) for size in rows]
    part.figure(
        f"{key}.bits_equal_at_other_places", packed_rows.same_bits([ours(x, w)], [ours(x[::-1], w)[::-1]]), equals=True
    )
    part.figure(f"{key}.bits_equal", all(equal), equals=True)
