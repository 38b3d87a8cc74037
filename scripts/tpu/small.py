"""The sections of scripts/tpu_check.py at sizes of a CPU, as scripts/gpu/small.py: kernels interpreted or plain jnp."""

from __future__ import annotations

import functools
from collections.abc import Callable

import jax
from gpu import packed_rows, row_products, small, swap
from gpu.part import Part
from tpu import grouped, recurrent, training
from tpu.sections import SHARED

from jaxrl_post.kernels import delta_rule_tpu, flash_tpu, grouped_tpu, product_tpu, recurrent_tpu
from jaxrl_post.kernels import grouped as products

KERNEL = functools.partial(flash_tpu.attention, interpret=True)
PRODUCT = functools.partial(product_tpu.product, interpret=True)
HEADS = (1, 2, 8, 8)  # of the delta rule: key heads, value heads, and numbers of a key and of a value
CHUNK = delta_rule_tpu.How(16, 2, interpret=True)


def _recurrent(part: Part) -> None:
    walk = functools.partial(recurrent_tpu.walk, interpret=True)
    packed = functools.partial(delta_rule_tpu.packed, how=CHUNK)
    recurrent.against_reference(part, HEADS, 32, walk, packed)


def _grouped(part: Part) -> None:
    def product(rows, matrices, sizes):
        return grouped_tpu.product(rows, matrices, sizes, interpret=True)

    grouped.against_reference(part, 4, (32, 16), 24, _with_gradients(product))


def _with_gradients(product: Callable) -> Callable:
    """Returns the interpreted product with the kernel's own gradients."""
    run = jax.custom_vjp(product)

    def back(kept: tuple, slope: jax.Array) -> tuple:
        rows, matrices, sizes = kept
        return *products.gradients(grouped_tpu, rows, matrices, sizes, slope, interpret=True), None

    run.defvjp(lambda *given: (product(*given), given), back)
    return run


SECTIONS: dict[str, Callable[[Part], None]] = {
    **{name: small.SECTIONS[name] for name in SHARED},
    "packed_rows": lambda part: packed_rows.against_reference(part, KERNEL, shapes=((1, 128, 4, 2, 64),)),
    "packed_rows_times": lambda part: packed_rows.times(part, KERNEL, (128,), (4, 2, 64)),
    "row_products": lambda part: row_products.beside_library(part, {small.NAME: small.WIDER}, (4, 8), PRODUCT),
    "recurrent": _recurrent,
    "grouped": _grouped,
    "train": lambda part: training.steps(part, {small.NAME: small.MODEL}, {64: 2}),
    "swap": lambda part: swap.cast(part, {small.NAME: small.MODEL}),
}
