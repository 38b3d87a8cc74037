"""What a step's rows need between two products, for models/decode_stack.py on GPUs: kernels, on one device of each replica."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
from jax.sharding import Mesh
from jaxtyping import Array

from jaxrl_post.engine.host import wire
from jaxrl_post.engine.host.wire import EngineSettings
from jaxrl_post.kernels import attention, attention_gpu, eight_bits, hardware, mapped, rows_gpu, small_arrays
from jaxrl_post.models import cache_kinds, decode_stack
from jaxrl_post.models.model_config import ModelConfig
from jaxrl_post.parallel import mesh as meshes


def of(config: ModelConfig, spread: Callable, rows: attention.Rows, *, interpret: Any = None) -> decode_stack.Between:
    """Returns what the stack calls for these rows. The cache is that of the engine's state.

    Args:
      spread: (run) -> `run` of one replica such that each device computes its own.
      interpret: plgpu.InterpretGPUParams, to run without a device.
    """
    places, norm = cache_kinds.places(config.kept), dict(eps=config.norm_eps, offset=config.norm_offset)
    simple = dict(interpret=interpret is not None) | norm
    normed = functools.partial(rows_gpu.normed, **simple)

    def attend(layer: int, made: Array, biases: Any, norms: Any, turn: Any, cache: Any, sinks: Array | None) -> Any:
        place, kept = places[layer], config.kept[layer]
        packing = dict(padded=attention_gpu.padded(config.heads // kept.kv_heads), scale=config.scale_of(layer))
        how = dict(window=kept.window, soft_cap=config.attn_soft_cap, interpret=interpret)

        def run(made: Array, then: Any, turn: Any, pages: Array, rows: attention.Rows, *sinks: Array) -> Any:
            given = made, then, turn, pages, rows
            queries, pages = rows_gpu.packed(*given, heads=config.heads, **packing, **simple)
            out = attention_gpu.attention_of_packed(queries, pages, rows, *sinks, heads=config.heads, **how)
            return out, pages

        then, own = rows_gpu.Projection(biases, norms), () if sinks is None else (sinks,)
        out, pages = spread(mapped.alone(run))(made, then, turn, cache[place].pages, rows, *own)
        return out, (*cache[:place], attention.Cache(pages), *cache[place + 1 :])

    return decode_stack.Between(rows_gpu.product, spread(mapped.alone(normed)), attend)


def serves(config: ModelConfig, dtype: Any, page: int) -> bool:
    """Returns whether kernels serve a model's layers."""
    shapes = {(kept.kv_heads, kept.head_dim) for kept in config.kept if isinstance(kept, cache_kinds.Pages)}
    return decode_stack.serves(config) and all(
        attention_gpu.serves(dtype, dtype, config.heads, kv_heads, head_dim, page) for kv_heads, head_dim in shapes
    )


def resolved(config: ModelConfig, mesh: Mesh, sizes: EngineSettings) -> EngineSettings:
    """Returns the settings with products in parts, or the library's, in the place of "auto"."""
    if sizes.products != wire.AUTO:
        return sizes
    why = reason(config, mesh.devices.flat[0], mesh.shape[meshes.TENSOR], sizes)
    return replace(sizes, products=wire.LIBRARY if why else wire.PARTS)


def reason(config: ModelConfig, device: Any, ways: int, sizes: EngineSettings) -> str:
    """Returns why XLA's operations run between products, or nothing. ways: devices that share a replica's heads."""
    if device.platform not in hardware.GPU:
        return "the kernels between products are written for GPUs"
    if without := hardware.without_kernels(device):
        return without
    if ways > 1:
        return f"the kernels between products need one device a replica, and here are {ways}"
    if not sizes.weights == sizes.kv == eight_bits.AUTO:
        return "the kernels between products know no codes of 8 bits"
    if not serves(config, sizes.dtype, sizes.page_size):
        return f"the kernels between products need {decode_stack.NEEDS}, and attention with {attention_gpu.NEEDS}"
    return ""


def lines(config: ModelConfig, device: Any, ways: int, sizes: EngineSettings) -> list[str]:
    """Returns what a run on a GPU says of its steps where more kernels run than could, and of an option that does nothing."""
    if device.platform not in hardware.GPU:
        return [f"engine.one_graph: {device.platform} has no CUDA graphs"] if sizes.one_graph else []
    counts = sizes.slots, *sizes.row_sizes
    why = reason(config, device, ways, sizes) if sizes.products == wire.AUTO else ""
    found = [f"kernels: XLA's operations run between the products of a step, because {why}"] if why else []
    if not all(small_arrays.fits(np.empty(count, bool)) for count in counts):
        most = math.isqrt(small_arrays.MOST)
        found.append(
            f"kernels: XLA computes the rows of a step. One kernel needs slots and rows that are powers of 2 up to {most}; "
            f"here are {sizes.slots} slots and {sizes.row_sizes} rows"
        )
    return found
