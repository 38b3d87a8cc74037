"""Experts in MXFP4 against numbers worked out by hand, and a checkpoint of gpt-oss in it beside the same one in bfloat16."""

from __future__ import annotations

import dataclasses
import json
import math
import shutil
from pathlib import Path

import numpy as np
import pytest
import safetensors.numpy
from refusals import refused
from test_models_hf import assert_same, shaken

from jaxrl_post.models import decoder, hf, mxfp4, tensor_file
from jaxrl_post.models.model_config import Experts, ModelConfig
from jaxrl_post.models.presets import PRESETS
from jaxrl_post.parallel import mesh

MODEL = ModelConfig(
    vocab_size=64, embed=64, layers=2, heads=4, kv_heads=2, head_dim=8, ffw=32, max_length=64, qkv_bias=True, o_bias=True,
    sinks=True, windows=(8, None), experts=Experts(4, 2, 32, biased=True, limit=7.0), family="gpt_oss",
)  # fmt: skip
STACKS = {"gate_up_proj": (64, 64), "down_proj": (32, 64)}  # inputs and outputs of each expert


def number(code: int, scale: int) -> float:
    """One number by the standard: a sign, two bits of exponent with bias 1, one bit of mantissa; then the block's scale."""
    sign, exponent, half = -1 if code >> 3 else 1, code >> 1 & 3, code & 1
    small = half / 2 if exponent == 0 else 2 ** (exponent - 1) * (1 + half / 2)
    return sign * small * 2.0 ** (scale - 127)


def by_hand(blocks: np.ndarray, scales: np.ndarray) -> np.ndarray:
    """[E, inputs, outputs] of blocks [E, outputs, inputs / 32, 16] and their scales, one number at a time."""
    E, outputs, groups, _ = blocks.shape
    out = np.empty((E, 32 * groups, outputs))
    for (e, column, group, pair), byte in np.ndenumerate(blocks):
        for which, code in enumerate((byte & 15, byte >> 4)):
            out[e, 32 * group + 2 * pair + which, column] = number(int(code), int(scales[e, column, group]))
    return out


def published(folder: Path) -> dict[str, np.ndarray]:
    """Writes a directory as gpt-oss is published, and returns its stacks of experts by name as they are by hand."""
    hf.save(folder, MODEL, shaken(MODEL), dtype="bfloat16")
    tensors, stacks = safetensors.numpy.load_file(folder / "model.safetensors"), {}
    noise = np.random.default_rng(0)
    for layer in range(MODEL.layers):
        for name, (inputs, outputs) in STACKS.items():
            stack = f"model.layers.{layer}.mlp.experts.{name}"
            blocks = noise.integers(0, 256, (4, outputs, inputs // 32, 16), np.uint8)
            scales = noise.integers(118, 126, blocks.shape[:3], np.uint8)
            del tensors[stack]
            tensors |= {f"{stack}_blocks": blocks, f"{stack}_scales": scales}
            stacks[stack] = by_hand(blocks, scales)
    safetensors.numpy.save_file(tensors, folder / "model.safetensors")
    about = json.loads((folder / "config.json").read_text())
    about["quantization_config"] = {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn"]}
    (folder / "config.json").write_text(json.dumps(about))
    return stacks


def test_a_published_checkpoint_has_the_numbers_worked_out_by_hand(tmp_path):
    stacks = published(tmp_path / "published")
    config, params = hf.load(tmp_path / "published")
    assert config == MODEL
    for layer in range(MODEL.layers):
        own, stem = params["layers"][str(layer)], f"model.layers.{layer}.mlp.experts"
        assert np.array_equal(own["experts_gate"], stacks[f"{stem}.gate_up_proj"][..., 0::2])
        assert np.array_equal(own["experts_up"], stacks[f"{stem}.gate_up_proj"][..., 1::2])
        assert np.array_equal(own["experts_down"], stacks[f"{stem}.down_proj"])
    # Every number is exact in bfloat16, so an export in it is the same model.
    assert hf.stored_dtype(tmp_path / "published") == "bfloat16"
    hf.save(tmp_path / "out", config, params, dtype="bfloat16")
    assert_same(hf.load(tmp_path / "out")[1], params)
    assert hf.remarks(tmp_path / "out") == []
    (remark,) = hf.remarks(tmp_path / "published")
    assert "are trained and saved without MXFP4" in remark


@pytest.mark.parametrize("sizes", [(2, 2, 1), (1, 2, 2), (1, 4, 1)])
def test_devices_read_their_own_pieces(tmp_path, sizes):
    """Pieces that begin within a block of 32, too: each of 4 devices has 16 of 64 inputs."""
    published(tmp_path / "published")
    split = mesh.param_shardings(mesh.make_mesh(*sizes), decoder.axes(MODEL), "learner")
    assert_same(hf.load(tmp_path / "published", shardings=split)[1], hf.load(tmp_path / "published")[1])


def test_every_code_and_the_scale_of_no_number(tmp_path):
    blocks = np.arange(256, dtype=np.uint8).reshape(1, 16, 1, 16)
    scales = np.array([0, 1, 126, 127, 128, 200, 253, 254, *range(120, 127), 255], np.uint8).reshape(1, 16, 1)
    safetensors.numpy.save_file({"a_blocks": blocks, "a_scales": scales}, tmp_path / "file")
    found = tensor_file.entries(tmp_path / "file")
    stack = mxfp4.packed("a", found["a_blocks"], found["a_scales"])
    read = mxfp4.read(stack, tuple(slice(0, size) for size in stack.shape)).astype(np.float64)
    exact = by_hand(blocks, scales)
    beyond = np.abs(exact) >= 2.0**128  # of the largest scale, as bfloat16 has them: infinite
    assert np.array_equal(read[..., :15], np.where(beyond, np.copysign(math.inf, exact), exact)[..., :15])
    assert np.isnan(read[..., 15]).all()


def drop(name):
    return lambda tensors, about: tensors.pop(name)


STACK = "model.layers.1.mlp.experts.down_proj"


@pytest.mark.parametrize(
    "change, sentence",
    [
        (drop(f"{STACK}_scales"), f"tensor {STACK} is missing"),
        (
            lambda tensors, about: tensors.update({f"{STACK}_scales": tensors[f"{STACK}_scales"][:, :63].copy()}),
            rf"tensor {STACK}_scales is U8\(4, 63, 1\), and MXFP4 has U8\(4, 64, 1\)",
        ),
        (
            lambda tensors, about: tensors.update({f"{STACK}_blocks": tensors[f"{STACK}_blocks"].astype(np.int8)}),
            rf"tensor {STACK}_blocks is I8\(4, 64, 1, 16\), and MXFP4 has U8",
        ),
        (
            lambda tensors, about: tensors.update(
                {f"{STACK}_{part}": tensors[f"{STACK}_{part}"][:3].copy() for part in ("blocks", "scales")}
            ),
            rf"tensor {STACK} has shape \(3, 32, 64\), expected \(4, 32, 64\)",
        ),
        (
            lambda tensors, about: tensors[f"{STACK}_scales"].__setitem__((2, 5, 0), 255),
            rf"tensor {STACK} holds 32 of 8192 numbers that are not finite as bfloat16; the first is nan at \[2, 0, 5\]",
        ),
        (
            lambda tensors, about: about["quantization_config"].update(quant_method="fp8"),
            "weights quantised by method 'fp8' are not read for gpt_oss; the nearest valid choice is a copy in "
            "bfloat16, or mxfp4",
        ),
        (lambda tensors, about: about.update(attention_bias=False), "attention_bias=False is not supported for GptOss"),
        (lambda tensors, about: about.update(swiglu_alpha=1.5), "swiglu_alpha=1.5 is not supported; it must be 1.702"),
        (lambda tensors, about: about.update(swiglu_limit=0), "swiglu_limit=0 must be above 0"),
    ],
)
def test_another_format_is_refused(tmp_path, change, sentence):
    published(tmp_path / "published")
    tensors = safetensors.numpy.load_file(tmp_path / "published" / "model.safetensors")
    about = json.loads((tmp_path / "published" / "config.json").read_text())
    change(tensors, about)
    safetensors.numpy.save_file(tensors, tmp_path / "published" / "model.safetensors")
    (tmp_path / "published" / "config.json").write_text(json.dumps(about))
    refused(sentence, hf.load, tmp_path / "published")


def test_without_a_rule_of_rotation_the_config_says_so(tmp_path):
    """transformers takes a missing rule of gpt-oss for YaRN."""
    hf.save(tmp_path / "out", MODEL, shaken(MODEL))
    about = json.loads((tmp_path / "out" / "config.json").read_text())
    assert about["rope_scaling"] == {"rope_type": "default"} and about["attention_bias"] is True
    shutil.copytree(tmp_path / "out", tmp_path / "other")
    del about["rope_scaling"]
    (tmp_path / "other" / "config.json").write_text(json.dumps(about))
    published_rule = PRESETS["gpt_oss_20b"].rope_scaling
    assert hf.read_config(tmp_path / "out" / "config.json") == MODEL
    assert hf.read_config(tmp_path / "other" / "config.json") == dataclasses.replace(MODEL, rope_scaling=published_rule)
