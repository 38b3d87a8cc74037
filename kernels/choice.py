"""Which kernels a run has, and one line for each part that a jnp reference computes on an accelerator."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from typing import Any

import jax.numpy as jnp

from jaxrl_post.kernels import (
    attention,
    branches_tpu,
    delta_rule_tpu,
    eight_bits,
    flash_gpu,
    flash_hopper,
    flash_tpu,
    grouped,
    hardware,
    mapped,
    recurrent,
    row_blocks,
    small_arrays,
    thresholds,
    thresholds_gpu,
    thresholds_tpu,
    verify,
)

# On a Hopper flash_hopper takes packed rows of some shapes that flash_gpu takes.
OF_PACKED_ROWS = {"tpu": flash_tpu, "cuda": flash_gpu}
OF_BRANCHES = {"tpu": branches_tpu, "cuda": flash_gpu}
OF_THRESHOLDS = {"tpu": thresholds_tpu, "cuda": thresholds_gpu}


def reference_lines(
    device: Any,
    dtype: Any,
    codes: Any = None,
    *,
    heads: int,
    kv_heads: int,
    head_dim: int,
    page: int,
    rows: int,
    vocab: int,
    cut_ways: int = 0,
) -> list[str]:
    """Returns a line for each part without a kernel, with the reason. On a CPU there are none.

    codes: the dtype of keys and values in 8 bits; None: they have `dtype`. heads, kv_heads, vocab: the share of one device.
    cut_ways: devices over which a vocabulary is split that top-k or top-p may cut; 0: neither does.
    """
    if device.platform == "cpu":
        return []
    if reason := hardware.without_kernels(device):
        return [f"kernels: the jnp references compute attention and sampling, because {reason}"]
    platform = "tpu" if device.platform == "tpu" else "cuda"
    lines, kernel = [], attention.KERNELS[platform]
    if not kernel.serves(dtype, dtype if codes is None else codes, heads, kv_heads, head_dim, page):
        lines.append(
            f"kernels: the jnp reference computes attention. The {platform} kernel needs "
            f"{kernel.NEEDS if codes is None else kernel.NEEDS_OF_CODES}; here are "
            f"{jnp.dtype(dtype).name}, heads of {head_dim}, {heads} and {kv_heads} heads a device, and pages of {page}"
        )
    if not (drawing := verify.KERNELS[platform]).serves(rows, vocab):
        lines.append(
            f"kernels: the jnp reference samples. The {platform} kernel needs {drawing.NEEDS}; here are {vocab} ids "
            "a device"
        )
    finding = OF_THRESHOLDS[platform]
    if cut_ways and not (cut_ways == 1 and finding.serves(rows, vocab)):
        lines.append(
            f"kernels: bisection finds the cuts of top-k and top-p, in 64 passes over the logits. Fewer need {finding.NEEDS}; "
            f"here are {vocab} ids a device on {cut_ways}"
        )
    return lines


def of_packed_rows(
    device: Any, dtype: Any, *, heads: int, kv_heads: int, head_dim: int, tokens: int, branches: bool = False
) -> tuple[Callable | None, str]:
    """Returns the kernel of the learner's attention, or None and, on an accelerator, the line that says why.

    heads, kv_heads: the share of one device. tokens: of a packed row. branches: texts share what they begin with.
    """
    if device.platform == "cpu":
        return None, ""
    platform = "tpu" if device.platform == "tpu" else "cuda"
    if reason := hardware.without_flash(device):
        return None, f"kernels: jnp computes the learner's attention, because {reason}"
    shape = jnp.dtype(dtype), heads, kv_heads, head_dim, tokens
    hopper = platform == "cuda" and not hardware.without_kernels(device)
    if hopper and not branches and flash_hopper.serves(*shape):
        return flash_hopper.attention, ""
    kernel = (OF_BRANCHES if branches else OF_PACKED_ROWS)[platform]
    if kernel.serves(*shape):
        small = platform == "cuda" and str(device.compute_capability) not in hardware.ROOMY
        return functools.partial(kernel.attention, tiles=flash_gpu.SMALL) if small else kernel.attention, ""
    what = "stretches" if branches else "rows"
    return None, (
        f"kernels: jnp computes the learner's attention. The {platform} kernel needs {kernel.NEEDS}; here are "
        f"{jnp.dtype(dtype).name}, heads of {head_dim}, {heads} and {kv_heads} heads a device, and {what} of {tokens} tokens"
    )


def of_thresholds(
    rows: int, vocab: int, shards: verify.Shards | None, platforms: frozenset[str]
) -> dict[str, Callable]:
    """Returns what finds thresholds.find's keys on a platform in the place of the bisection, by platform.

    Nothing does where devices share the vocabulary. Then each of them has few ids, and sums are all that they exchange.
    """
    if shards is not None and shards.count > 1:
        return {}

    def placed(run: Callable) -> Callable:
        own = thresholds.of_all_rows(run)
        return own if shards is None else shards.run(own)

    return {
        name: placed(one.keys) for name, one in OF_THRESHOLDS.items() if name in platforms and one.serves(rows, vocab)
    }


def of_small_arrays(device: Any, spread: Callable) -> Callable:
    """Returns the form of small_arrays.run that `device` runs. spread: of a function that each device computes for its replica."""
    if device.platform not in hardware.GPU or hardware.without_flash(device):
        return small_arrays.run

    def run(function: Callable, values: Any, tables: Any = (), in_place: int = 0) -> Any:
        form = functools.partial(small_arrays.run_as_kernel, function, in_place=in_place)
        return spread(mapped.alone(form))(values, tuple(tables))

    return run


def without_products(device: Any, devices: int, dtype: Any, weights: str, sides: Iterable[int]) -> str:
    """Returns why no kernel computes products whose bits do not depend on the number of rows, or an empty text.

    devices: of a mesh. weights: the format of an engine's matrices. sides: of every matrix. On a CPU XLA computes them in blocks.
    """
    if device.platform == "cpu":
        return ""
    platform = "tpu" if device.platform == "tpu" else "cuda"
    kernel = row_blocks.KERNELS[platform]
    if reason := hardware.without_flash(device):
        return reason
    if devices > 1:
        return f"the kernel runs on one device, and the engine's mesh has {devices}"
    if weights != eight_bits.AUTO:
        return f"the kernel reads no codes of 8 bits, and engine.weights is {weights!r}"
    if odd := [side for side in sides if not kernel.serves(dtype, dtype, side, side)]:
        return f"the {platform} kernel needs {kernel.NEEDS}; here are {jnp.dtype(dtype).name} and a side of {odd[0]}"
    return ""


def of_experts(device: Any) -> Callable:
    """Returns the product of sorted rows with their experts' matrices, with the kernels that `device` runs."""
    return functools.partial(grouped.product, platforms=hardware.platforms(device, hardware.without_flash))


def experts_line(device: Any, dtype: Any, *, embed: int, ffw: int) -> str:
    """Returns the line that names what multiplies rows with experts on an accelerator. embed, ffw: of one device's matrices."""
    if device.platform == "cpu":
        return ""
    platform = "tpu" if device.platform == "tpu" else "cuda"
    kernel, reason = grouped.KERNELS[platform], hardware.without_flash(device)
    serves = all(kernel.serves(jnp.dtype(dtype), jnp.dtype(dtype), *sides) for sides in ((embed, ffw), (ffw, embed)))
    if serves and not reason:
        return f"kernels: the {platform} kernel of grouped products reads the experts that rows chose, and no others"
    reason = reason or (
        f"the {platform} kernel needs {kernel.NEEDS}; here are {jnp.dtype(dtype).name} and matrices of {embed} x {ffw}"
    )
    return f"kernels: ragged_dot multiplies rows with experts, on a GPU with all of them, because {reason}"


def recurrent_line(device: Any, kind: Any, *, ways: int, rows: int) -> str:
    """Returns the line that says why jnp walks recurrent rows on an accelerator, or nothing.

    kind: a models.cache_kinds.RecurrentState, whose heads are divided over `ways` devices. rows: of a step.
    """
    if device.platform == "cpu":
        return ""
    platform = "tpu" if device.platform == "tpu" else "cuda"
    kernel, reason = recurrent.KERNELS[platform], hardware.without_flash(device)
    heads = kind.key_heads // ways, kind.value_heads // ways
    if not reason and kernel.serves(rows, *heads, kind.key_dim, kind.value_dim):
        return ""
    reason = reason or (
        f"the {platform} kernel needs {kernel.NEEDS}; here are states of {kind.key_dim} x {kind.value_dim} and {rows} rows"
    )
    return f"kernels: jnp walks recurrent rows and moves all states in every turn, because {reason}"


def of_delta_rule(device: Any) -> Any:
    """Returns the module whose kernels compute the learner's gated delta rule on `device` where they serve a shape, or None."""
    return delta_rule_tpu if device.platform == "tpu" and not hardware.without_kernels(device) else None


def delta_rule_line(device: Any, kind: Any, *, ways: int, tokens: int) -> str:
    """Returns the line that says why XLA computes the learner's gated delta rule on an accelerator, or nothing.

    kind: a models.cache_kinds.RecurrentState, whose heads are divided over `ways` devices. tokens: of a packed row.
    """
    if device.platform == "cpu":
        return ""
    kernel, heads = of_delta_rule(device), (kind.key_heads // ways, kind.value_heads // ways)
    if kernel and kernel.serves(jnp.float32, *heads, kind.key_dim, kind.value_dim, tokens):
        return ""
    reason = hardware.without_kernels(device) if device.platform == "tpu" else "the kernel is written for TPUs"
    reason = reason or (
        f"the tpu kernel needs {kernel.NEEDS}; here are states of {kind.key_dim} x {kind.value_dim} and rows of {tokens} tokens"
    )
    return f"kernels: XLA's products compute the learner's gated delta rule, because {reason}"
