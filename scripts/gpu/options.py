"""Attention of one layer by other libraries, beside the kernel of packed rows: causal, and a whole row is one segment.

None lowers without a device, so no test covers them. Where one is not installed or fails, its absence is a figure.
cuDNN and Transformer Engine hold no segments of packed rows exactly by their public interfaces, so that a run does not
use them. tokamax does, by the first key of each query.
"""

from __future__ import annotations

import functools
import itertools
import os
import warnings
from collections.abc import Callable, Sequence

import jax
from gpu import packed_rows
from gpu.part import Part

from jaxrl_post.kernels import flash_gpu


def cudnn(part: Part, implementation: str = "cudnn", **sizes) -> None:
    def form(q, k, v, ids, *, scale, window, soft_cap):
        return jax.nn.dot_product_attention(q, k, v, scale=scale, is_causal=True, implementation=implementation)

    beside(part, "cudnn", form, **sizes)


def transformer_engine(part: Part, **sizes) -> None:
    """Tries the fused attention of Transformer Engine, by its deterministic kernels.

    Raises:
      ImportError: it is not installed. UserWarning: it has no fused kernel for the shape.
    """
    os.environ |= {"NVTE_FUSED_ATTN": "1", "NVTE_ALLOW_NONDETERMINISTIC_ALGO": "0"}
    warnings.filterwarnings("error", message="Fused attention is not enabled")  # it would compute something else
    from transformer_engine.jax.flax import DotProductAttention

    def form(q, k, v, ids, *, scale, window, soft_cap):
        attend = DotProductAttention(
            head_dim=q.shape[-1],
            num_attention_heads=q.shape[2],
            num_gqa_groups=k.shape[2],
            attn_mask_type="causal",
            qkv_layout="bshd_bshd_bshd",
            scale_factor=scale,
            transpose_batch_sequence=False,
            dtype=q.dtype,
        )
        return attend.apply({}, q, k, v).reshape(q.shape)  # `deterministic` would leave out the backward pass

    beside(part, "transformer_engine", form, **sizes)


def tokamax(part: Part, attend: Callable | None = None, **sizes) -> None:
    """Tries the kernel of tokamax for Hopper, with one segment in a row and with four.

    Args:
      attend: another form of its attention. None: that of Pallas-Mosaic.

    Raises:
      ImportError: it is not installed.
    """
    from tokamax._src.ops.attention import base, pallas_mosaic_gpu  # the public function takes no first keys

    attend = attend or pallas_mosaic_gpu.PallasMosaicGpuFlashAttention()

    def form(q, k, v, ids, *, scale, window, soft_cap):
        first, _ = flash_gpu.stretches(ids, None)
        return attend(q, k, v, mask=base.Mask(k_start=first[:, None], is_causal=True), logits_scale=scale)

    beside(part, "tokamax", form, counts=(1, 4), **sizes)


def beside(
    part: Part,
    name: str,
    form: Callable,
    *,
    kernel: Callable = flash_gpu.attention,
    lengths: Sequence = packed_rows.LENGTHS,
    heads=packed_rows.HEADS,
    counts: Sequence[int] = (1,),
) -> None:
    """Times `form`, and writes how far its results are from the kernel's. `counts`: of segments in a row."""
    for tokens, count in itertools.product(lengths, counts):
        key = f"{name}.{tokens}_tokens" + (f"_{count}_segments" if len(counts) > 1 else "")
        if part.wants(key, 10.0):
            given, ids = packed_rows.inputs(1, tokens, *heads), packed_rows.even(tokens, count)
            how = dict(scale=heads[-1] ** -0.5, window=None, soft_cap=None)
            pair = [packed_rows.both(functools.partial(one, **how))(*given, ids) for one in (form, kernel)]
            far = [packed_rows.distance(a, b) for a, b in zip(*pair, strict=True)]
            part.figure(key, packed_rows.timed(form, given, ids) | {"difference": dict(zip(["o", "q", "k", "v"], far))})
