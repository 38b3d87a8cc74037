"""What figures of scripts/tpu_check.py are expected: by the makers' figures of a chip, and the shares of them that plans assume.

No TPU has confirmed any. They are the assumptions of plans and cost tables (jaxrl_post/launch/plan/roofline.py). A figure far from its
expectation says which of them to correct.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from typing import Any

import jax
from gpu import decoding
from gpu.expected import Expected

from jaxrl_post.launch.plan import roofline
from jaxrl_post.models import cache_kinds, decoder
from jaxrl_post.models.presets import PRESETS
from jaxrl_post.parallel import devices

SOURCE = "estimate"
PUBLISHED = "published"
DECODED = {"decode_1_5b": "qwen2_5_1_5b", "decode_7b": "qwen2_5_7b"}
NARROW = 1.15  # a range's upper end over its lower one


def of_kind(kind: str, figures: Mapping[str, Any]) -> dict[str, Expected]:
    """Returns the expectations for a kind of device as jax names it. A kind that is no TPU of the table has none."""
    chip = devices.of(kind)
    if not chip.known or chip.platform != "tpu":
        return {}
    out = {
        "device.copy_gb_per_s": _between(roofline.MEMORY * chip.bandwidth / 1e9, chip.bandwidth / 1e9, PUBLISHED),
        "device.product_tflops": _between(0.8 * chip.flops / 1e12, chip.flops / 1e12, PUBLISHED),
    }
    for preset in DECODED.values():
        for batch, context in itertools.product(decoding.BATCHES, decoding.CONTEXTS):
            step_ms = 1e3 * _read(preset, batch, context) / (roofline.MEMORY * chip.bandwidth)
            key = f"decode.{preset}.batch_{batch}_context_{context}/step_ms"
            out[key] = _between(step_ms, NARROW * step_ms, SOURCE)
    for preset, tokens, count in itertools.product(("qwen2_5_1_5b", "qwen2_5_0_5b"), (4096, 8192), (1, 4)):
        out[f"train.{preset}.{tokens}_tokens_{count}_sequences/mfu"] = _between(
            0.8 * roofline.TRAIN, roofline.TRAIN, SOURCE
        )
    return out


def _between(low: float, high: float, source: str) -> Expected:
    return Expected(round(low, 3), round(high, 3), source)


def _read(preset: str, batch: int, context: int) -> float:
    """Returns the bytes of weights, keys and values that a step of decoding reads."""
    model = PRESETS[preset]
    weights = 2 * sum(x.size for x in jax.tree.leaves(decoder.abstract(model)))
    return weights + 2.0 * batch * context * cache_kinds.held(model.kept)
