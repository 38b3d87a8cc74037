"""Experts in MXFP4, the format in which gpt-oss is published: 4-bit floats in blocks of 32 that share a power of two.

The format is that of the Open Compute Project (MX, arXiv 2310.10537): a number is one of 16 values times
2 ** (scale - 127). A file has two tensors for each stack of matrices [E, inputs, outputs]:
- NAME_blocks uint8[E, outputs, inputs / 32, 16]. A byte holds two numbers, the first in its lower four bits.
- NAME_scales uint8[E, outputs, inputs / 32]

Every such number is exact in bfloat16, unless its scale stands for no number.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np

from jaxrl_post.models import config_keys as keys
from jaxrl_post.models import tensor_file
from jaxrl_post.models.tensor_file import Box, Entry
from jaxrl_post.ring.json_text import shown

BLOCK = 32  # neighbouring inputs of one scale
_MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
_VALUES = np.array([*_MAGNITUDES, *(-value for value in _MAGNITUDES)], np.float32)
_NONE = 255  # the scale of numbers that are none


class Packed(NamedTuple):
    """A stack of matrices [E, inputs, outputs] in its two tensors. The first four fields are those of an Entry."""

    file: Path
    type: str
    shape: tuple[int, ...]
    bytes: int
    blocks: Entry
    scales: Entry


def check_method(file: Path, kind: str, given: Mapping) -> None:
    """Refuses a config.json whose weights are quantised in a way that is not read for its model_type."""
    about = keys.section(file, given, "quantization_config")
    method = about.get("quant_method", "of no name")
    if about and (kind, method) != ("gpt_oss", "mxfp4"):
        raise ValueError(
            f"model {file}: weights quantised by method {shown(method)} are not read for {kind}; the nearest valid choice is a "
            f"copy in bfloat16, or mxfp4 for gpt_oss"
        )


def packed(name: str, blocks: Entry, scales: Entry) -> Packed:
    """Returns the stack that two tensors of files hold.

    Raises:
      ValueError: they have other shapes or another type than the format has.
    """
    count, outputs, groups = (*blocks.shape, 0, 0, 0)[:3]
    for part, entry, shape in (
        ("blocks", blocks, (count, outputs, groups, BLOCK // 2)),
        ("scales", scales, (count, outputs, groups)),
    ):
        if entry.shape != shape or entry.type != "U8":
            raise ValueError(
                f"model {entry.file}: tensor {name}_{part} is {entry.type}{shown(entry.shape)}, and MXFP4 has U8{shown(shape)}"
            )
    return Packed(blocks.file, "BF16", (count, groups * BLOCK, outputs), blocks.bytes + scales.bytes, blocks, scales)


def read(stack: Packed, box: Box) -> np.ndarray:
    """Returns a box of a stack [E, inputs, outputs] as bfloat16, in memory of its own beside one matrix."""
    experts, inputs, outputs = box
    out = np.empty(tuple(side.stop - side.start for side in box), jnp.bfloat16)
    groups = slice(inputs.start // BLOCK, -(-inputs.stop // BLOCK))
    for at, expert in enumerate(range(experts.start, experts.stop)):
        place = (slice(expert, expert + 1), outputs, groups)
        scales = tensor_file.read(stack.scales, place)[0]
        pairs = tensor_file.read(stack.blocks, (*place, slice(0, BLOCK // 2)))[0]
        numbers = _VALUES[np.stack([pairs & 15, pairs >> 4], axis=-1)].reshape(*scales.shape, BLOCK)
        with np.errstate(over="ignore"):  # what overflows is refused by its tensor's name
            numbers = np.ldexp(numbers, scales[..., None].astype(np.int32) - 127)
        numbers[scales == _NONE] = np.nan
        columns = numbers.reshape(len(scales), -1)[:, inputs.start - groups.start * BLOCK :][:, : out.shape[1]]
        out[at] = columns.T
    return out
