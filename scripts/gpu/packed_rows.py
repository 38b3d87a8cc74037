"""The learner's attention over packed rows, against jnp forward and backward, and its time for one layer of Qwen2.5-7B.

On a Hopper both of its kernels are tried: that of wgmma, which a run takes there, beside that of Triton.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from gpu import timing
from gpu.part import Part

from jaxrl_post.kernels import flash_gpu, flash_hopper, hardware
from jaxrl_post.trainer import attention

FAR = 1e-2  # 2-norm over 2-norm: bfloat16 keeps 8 bits, and each weight and each result is rounded once
CASES = {"plain": dict(window=None, soft_cap=None), "window": dict(window=150, soft_cap=30.0)}
# Rows, tokens, query heads, key-value heads, numbers of each.
SHAPES = ((2, 1024, 12, 2, 128), (2, 512, 14, 2, 64), (1, 512, 16, 4, 256), (1, 512, 8, 2, 512))
LENGTHS = (4096, 8192)
HEADS = (28, 4, 128)
# Sides, warps and stages that the compiler takes for heads of 128 without spilling a register, beside those of a run.
CANDIDATES = {
    "forward": ((64, 64, 4, 3), (128, 64, 8, 2), (128, 64, 8, 3), (128, 128, 8, 2), (128, 128, 8, 3), (64, 128, 4, 2)),
    "by_queries": ((64, 64, 4, 3), (128, 64, 8, 2), (128, 128, 8, 2), (64, 128, 4, 2)),
    "by_keys": ((32, 64, 4, 3), (64, 64, 4, 1), (64, 64, 8, 2), (32, 128, 8, 2)),
}


def inputs(rows: int, tokens: int, heads: int, kv_heads: int, width: int) -> list[jax.Array]:
    """Returns q, k, v and a slope of the output, in bfloat16."""
    keys = jax.random.split(jax.random.key(3), 4)
    return [
        jax.random.normal(key, (rows, tokens, count, width), jnp.bfloat16)
        for key, count in zip(keys, (heads, kv_heads, kv_heads, heads))
    ]


def segments(rows: int, tokens: int) -> jax.Array:
    """Returns ids of segments that begin and end inside blocks. The first row ends with padding, which is segment 0."""
    ends = np.array([[tokens // 7, tokens // 2 + 1, tokens // 2 + 2, tokens - tokens // 5]] * rows)
    ids = 1 + (np.arange(tokens)[None, :, None] >= ends[:, None, :]).sum(-1)
    ids[0, ids[0] == 5] = 0
    return jnp.asarray(ids, jnp.int32)


def even(tokens: int, count: int) -> jax.Array:
    """Returns ids of one row with `count` segments of equal length."""
    return jnp.repeat(jnp.arange(1, count + 1, dtype=jnp.int32), tokens // count)[None]


def both(form: Callable) -> Callable:
    """Returns a program of (q, k, v, slope, ids): the output, and the gradients by q, k and v."""

    def run(q, k, v, slope, ids):
        out, back = jax.vjp(lambda *x: form(*x, ids), q, k, v)
        return out, *back(slope)

    return jax.jit(run)


def everywhere(part: Part) -> None:
    """Compares every kernel of the device, at the shapes that it serves."""
    for name, kernel in kernels().items():
        served = [one for one in SHAPES if kernel.serves(jnp.bfloat16, *one[2:], one[1])]
        against_reference(part, kernel.attention, served, name)


def every_time(part: Part) -> None:
    """Times every kernel of the device."""
    for name, kernel in kernels().items():
        times(part, kernel.attention, name=name)


def kernels() -> dict[str, Any]:
    """Returns the kernels of this device, by what their figures are called."""
    hopper = not hardware.without_kernels(jax.devices()[0])
    return {"packed_rows": flash_gpu} | ({"packed_rows.hopper": flash_hopper} if hopper else {})


def against_reference(
    part: Part, kernel: Callable = flash_gpu.attention, shapes: Sequence = SHAPES, name: str = "packed_rows"
) -> None:
    """Compares values and gradients with jnp in float32, and bits with those of a second run."""
    for shape in shapes:
        given, ids = inputs(*shape), segments(*shape[:2])
        for case, how in CASES.items():
            key = f"{name}.{case}_{'x'.join(map(str, shape))}"
            if not part.wants(f"{key}.bits_equal_beside_others", 10.0):
                continue
            run = both(functools.partial(kernel, scale=shape[-1] ** -0.5, **how))
            found = run(*given, ids)
            with jax.default_matmul_precision("highest"):
                wide = [x.astype(jnp.float32) for x in given]
                right = both(functools.partial(attention.blocks, scale=shape[-1] ** -0.5, **how))(*wide, ids)
            for what, a, b in zip(("output", "dq", "dk", "dv"), found, right, strict=True):
                part.figure(f"{key}.{what}_difference", distance(a, b), at_most=FAR)
            part.figure(f"{key}.bits_equal_again", same_bits(found, run(*given, ids)), equals=True)
            part.figure(f"{key}.bits_equal_beside_others", _apart(run, given, ids, found), equals=True)


def _apart(run: Callable, given: list[jax.Array], ids: jax.Array, found: tuple) -> bool:
    """Returns whether nothing of a segment changes when every other one does."""
    mine = (ids == 2)[:, :, None, None]
    changed = run(*(jnp.where(mine, x, -x) for x in given), ids)
    return same_bits(*([jnp.where(mine, x, 0) for x in some] for some in (found, changed)))


def distance(a: jax.Array, b: jax.Array) -> float:
    """Returns the 2-norm of the difference over that of `b`."""
    a, b = (np.asarray(x.astype(jnp.float32), np.float64) for x in (a, b))
    return float(np.linalg.norm(a - b) / np.linalg.norm(b))


def same_bits(one: Sequence[jax.Array], other: Sequence[jax.Array]) -> bool:
    """Returns whether all arrays are equal to the bit."""
    return all(np.asarray(a).tobytes() == np.asarray(b).tobytes() for a, b in zip(one, other, strict=True))


def work(lengths: Sequence[int], heads: int, width: int) -> tuple[float, float]:
    """Returns FLOPs of causal attention over segments: forward, and forward with backward.

    Forward has two products over half of all pairs. Backward has five.
    """
    forward = 2.0 * heads * width * sum(length**2 for length in lengths)
    return forward, 3.5 * forward


def times(
    part: Part,
    kernel: Callable = flash_gpu.attention,
    lengths: Sequence = LENGTHS,
    heads=HEADS,
    name: str = "packed_rows",
) -> None:
    """Times one row of one segment, and of four, by the kernel and by jnp."""
    for tokens in lengths:
        for count in (1, 4):
            key = f"{name}.{tokens}_tokens_{count}_segments"
            if part.wants(key, 12.0):
                given, ids = inputs(1, tokens, *heads), even(tokens, count)
                part.figure(key, timed(kernel, given, ids) | {"reference": timed(attention.blocks, given, ids)})


def tiles(
    part: Part, candidates: Mapping = CANDIDATES, tokens: int = LENGTHS[0], heads=HEADS, base=flash_gpu.NARROW, **how
) -> None:
    """Times one row of one segment with other tiles of one kernel: forward alone, or with backward.

    Those of a run are `packed_rows.4096_tokens_1_segments`."""
    for kernel, sizes in candidates.items():
        for size in sizes:
            key = f"packed_rows.tiles.{kernel}.{'x'.join(map(str, size))}_ms"
            if part.wants(key, 12.0):
                given, ids = inputs(1, tokens, *heads), even(tokens, 1)
                made = dataclasses.replace(base, **{kernel: flash_gpu.Tile(*size)})
                form = functools.partial(flash_gpu.attention, tiles=made, **how)
                part.figure(key, timed(form, given, ids)["forward_ms" if kernel == "forward" else "with_backward_ms"])


def timed(form: Callable, given: list[jax.Array], ids: jax.Array) -> dict[str, float | None]:
    """Returns milliseconds of a form, forward alone and with backward, and the share of the chip's peak."""
    form = functools.partial(form, scale=given[0].shape[-1] ** -0.5, window=None, soft_cap=None)
    *_, heads, width = given[0].shape
    flops = work(np.unique(np.asarray(ids), return_counts=True)[1].tolist(), heads, width)
    took = timing.seconds(jax.jit(form), *given[:3], ids), timing.seconds(both(form), *given, ids)
    return {
        f"{name}{what}": value
        for name, need, s in zip(("forward", "with_backward"), flops, took)
        for what, value in (("_ms", 1e3 * s), ("_share_of_peak", timing.share_of_peak(need, s)))
    }
