"""Qwen3.5 and Qwen3-Next in the files of Hugging Face: its keys, its refusals, and leaves that share a tensor."""

from __future__ import annotations

import dataclasses
import json
import shutil

import jax
import ml_dtypes
import numpy as np
import pytest
import safetensors.numpy
from refusals import refused
from test_models_hf import GOLDENS, assert_same, edited, shaken

from jaxrl_post.models import decoder, families, hf
from jaxrl_post.models.model_config import Experts, LinearAttention
from jaxrl_post.parallel import mesh

GOLDEN = GOLDENS / "qwen3_5"
KEYS = json.loads((GOLDEN / "config.json").read_text())
LINEAR = "model.layers.0.linear_attn"


def read_as(tmp_path, given: dict):
    (tmp_path / "config.json").write_text(json.dumps(given))
    return families.read(tmp_path / "config.json")


def test_absent_keys_are_the_defaults_of_transformers(tmp_path):
    """Qwen3_5TextConfig of transformers 5.24.0, of which a Qwen3_5ForCausalLM has so many parameters."""
    sizes = {"vocab_size": 248320, "hidden_size": 4096, "intermediate_size": 12288, "num_hidden_layers": 32}
    config = read_as(tmp_path, {"model_type": "qwen3_5_text", "num_attention_heads": 16} | sizes)
    assert sum(leaf.size for leaf in jax.tree.leaves(decoder.abstract(config))) == 8_953_803_264
    every_fourth = tuple(at for at in range(32) if at % 4 != 3)
    assert config.linear == LinearAttention(16, 32, 128, 128, 4, every_fourth)
    assert (config.rotary_dim, config.rope_theta, config.norm_eps, config.max_length) == (64, 1e4, 1e-6, 32768)
    assert (config.kv_heads, config.head_dim, config.tied, config.norm_offset) == (4, 256, False, 1.0)


def test_absent_keys_with_experts_are_the_defaults_of_transformers(tmp_path):
    """Qwen3_5MoeTextConfig of transformers 5.24.0. A file needs no width of a feed-forward: every layer has experts."""
    sizes = {"vocab_size": 248320, "hidden_size": 2048, "num_hidden_layers": 40, "num_attention_heads": 16}
    config = read_as(tmp_path, {"model_type": "qwen3_5_moe_text"} | sizes)
    assert sum(leaf.size for leaf in jax.tree.leaves(decoder.abstract(config))) == 34_660_610_688
    assert config.experts == Experts(256, 8, 512, shared_ffw=512) and config.kv_heads == 2
    assert read_as(tmp_path, families.write(config)) == config


def test_absent_keys_of_qwen3_next_are_the_defaults_of_transformers(tmp_path):
    """Qwen3NextConfig of transformers 5.24.0."""
    sizes = {"vocab_size": 151936, "hidden_size": 2048, "num_hidden_layers": 48, "num_attention_heads": 16}
    config = read_as(tmp_path, {"model_type": "qwen3_next"} | sizes)
    assert sum(leaf.size for leaf in jax.tree.leaves(decoder.abstract(config))) == 79_674_391_296
    assert config.experts == Experts(512, 10, 512, shared_ffw=512) and (config.kv_heads, config.ffw) == (2, 5632)
    assert read_as(tmp_path, families.write(config)) == config


# As published configs spell it. Sections are of pictures' positions, and text has the same in all three.
ROPE = {"mrope_interleaved": True, "mrope_section": [11, 11, 10], "rope_type": "default", "rope_theta": 1e7}


@pytest.mark.parametrize(
    "change, fields",
    [
        ({"rope_parameters": ROPE}, dict(rope_theta=1e7, rotary_dim=4)),
        ({"rope_parameters": ROPE | {"partial_rotary_factor": 1.0}}, dict(rope_theta=1e7, rotary_dim=None)),
        (
            {"rope_parameters": None, "rope_theta": 50.0, "partial_rotary_factor": 0.75},
            dict(rope_theta=50.0, rotary_dim=12),
        ),
        ({"layer_types": None, "full_attention_interval": 3}, dict(linear=LinearAttention(2, 4, 8, 12, 4, (0, 1)))),
        ({"output_gate_type": "swish", "attn_output_gate": True, "mamba_ssm_dtype": "float32"}, {}),
        ({"mtp_num_hidden_layers": 1, "mtp_use_dedicated_embeddings": False}, {}),
    ],
    ids=range(6),
)
def test_keys_become_fields_and_keys_again(tmp_path, change, fields):
    given = {key: value for key, value in (KEYS | change).items() if value is not None}
    config = read_as(tmp_path, given)
    assert config == dataclasses.replace(hf.read_config(GOLDEN / "config.json"), **fields)
    assert read_as(tmp_path, families.write(config)) == config


def test_every_part_of_a_head_comes_back(tmp_path):
    """Readers round the product of head_dim and the written part down."""
    config = hf.read_config(GOLDEN / "config.json")
    for head_dim in (22, 98, 256):
        for part in range(2, head_dim, 2):
            one = dataclasses.replace(config, head_dim=head_dim, rotary_dim=part)
            about = families.write(one)
            assert int(head_dim * about["rope_parameters"]["partial_rotary_factor"]) == part
    assert read_as(tmp_path, about) == one


@pytest.mark.parametrize(
    "change, sentence",
    [
        ({"attention_bias": True}, "attention_bias=True is not supported for Qwen3_5ForCausalLM; it must be absent or false"),
        ({"attn_output_gate": False}, "attn_output_gate=False is not supported; the nearest valid value is True"),
        ({"output_gate_type": "sigmoid"}, "output_gate_type='sigmoid' is not supported; the nearest valid value is 'swish'"),
        ({"hidden_act": "gelu"}, "hidden_act='gelu' is not supported; the nearest valid value is 'silu'"),
        ({"rope_parameters": ROPE | {"rope_type": "yarn", "factor": 4.0}}, "rope parameters .* rope_type must be default"),
        ({"rope_parameters": ROPE | {"partial_rotary_factor": 1.5}}, "partial_rotary_factor=1.5 must be from 0 to 1"),
        ({"rope_parameters": ROPE | {"partial_rotary_factor": 0.2}}, "rotary_dim=3 must be even .* nearest valid value is 2"),
        ({"layer_types": ["sliding_attention"] * 3}, "must name full_attention or linear_attention for each of 3 layers"),
        ({"layer_types": ["full_attention"] * 3}, r"linear.layers=\(\) must name layers from 0 to 2, at least one and"),
        ({"layer_types": ["full_attention"]}, "layer_types=.* must name .* for each of 3 layers"),
        ({"linear_num_key_heads": 3}, "value_heads=4 that are a multiple of key_heads=3"),
        ({"linear_conv_kernel_dim": 0}, "linear_conv_kernel_dim must be a whole number of at least 1, got 0"),
        ({"full_attention_interval": 0}, "full_attention_interval must be a whole number of at least 1, got 0"),
        ({"quantization_config": {"quant_method": "fp8"}}, "quantised by method 'fp8' are not read"),
    ],
    ids=range(14),
)  # fmt: skip
def test_what_would_change_scores_is_refused(tmp_path, change, sentence):
    assert "config.json" in refused(sentence, read_as, tmp_path, KEYS | change)


def test_experts_are_in_every_layer_of_qwen35_and_renormalised(tmp_path):
    """transformers does not read these keys there. Of Qwen3-Next it does."""
    for change, sentence in (
        ({"mlp_only_layers": [1]}, r"mlp_only_layers=\[1\] is not supported; the nearest valid value is \[\]"),
        ({"norm_topk_prob": False}, "norm_topk_prob=False is not supported; the nearest valid value is True"),
    ):
        own, of_next = (
            json.loads((GOLDENS / name / "config.json").read_text()) for name in ("qwen3_5_moe", "qwen3_next")
        )
        refused(sentence, read_as, tmp_path, own | change)
        assert read_as(tmp_path, of_next | change).experts in (
            Experts(5, 2, 16, False, 24, (1,)),
            Experts(5, 2, 16, False, 24, (0,)),
        )
    every = {"mlp_only_layers": [0, 1, 2]}
    assert refused("leave none of 3 layers with experts", read_as, tmp_path, of_next | every).endswith("with experts")


@pytest.mark.parametrize(
    "change, sentence",
    [
        (dict(activation="gelu"), "activation='gelu' cannot be saved as Qwen3_5ForCausalLM"),
        (dict(windows=(None, 8, None)), r"windows=\(None, 8, None\) cannot be saved as Qwen3_5ForCausalLM"),
        (dict(attn_gate=False), "attn_gate=False cannot be saved as Qwen3_5ForCausalLM"),
        (dict(linear=None), "linear=None cannot be saved as Qwen3_5ForCausalLM"),
        (dict(qkv_bias=True), "qkv_bias=True cannot be saved as Qwen3_5ForCausalLM"),
    ],
)
def test_what_the_family_cannot_say_is_not_saved(change, sentence):
    config = hf.read_config(GOLDEN / "config.json")
    refused(sentence, hf.check_savable, dataclasses.replace(config, **change))


def test_queries_keys_and_values_are_ranges_of_rows(tmp_path):
    """By number: head h of queries, keys and values lies at these rows of one matrix, and of one convolution."""
    config = hf.read_config(GOLDEN / "config.json")
    params = shaken(config)
    hf.save(tmp_path / "out", config, params)
    tensors, layer = safetensors.numpy.load_file(tmp_path / "out" / "model.safetensors"), params["layers"]["0"]
    rows, channels = tensors[f"{LINEAR}.in_proj_qkv.weight"], tensors[f"{LINEAR}.conv1d.weight"]
    assert (rows.shape, channels.shape) == ((2 * 2 * 8 + 4 * 12, 32), (80, 1, 4))
    assert tensors[f"{LINEAR}.in_proj_b.weight"].shape == (4, 32) and tensors[f"{LINEAR}.out_proj.weight"].shape == (
        32,
        48,
    )
    for name, start, head, size in (("q", 0, 1, 8), ("k", 16, 1, 8), ("v", 32, 3, 12)):
        own = slice(start + head * size, start + (head + 1) * size)
        np.testing.assert_array_equal(rows[own], layer[f"linear_{name}"][:, head].T)
        np.testing.assert_array_equal(channels[own, 0], layer[f"conv_{name}"][:, head].T)
    np.testing.assert_array_equal(tensors[f"{LINEAR}.in_proj_a.weight"], layer["linear_decay"].T)
    again, loaded = hf.load(tmp_path / "out")
    assert again == config
    assert_same(loaded, params)


def test_rows_of_qwen3_next_lie_by_key_head():
    """By number: in each of two stretches are a query, a key, and the values and gates of two value heads."""
    _, params = hf.load(GOLDENS / "qwen3_next")
    tensors, layer = safetensors.numpy.load_file(GOLDENS / "qwen3_next" / "model.safetensors"), params["layers"]["0"]
    rows, scalars = (tensors[f"{LINEAR}.in_proj_{name}.weight"].astype(np.float32) for name in ("qkvz", "ba"))
    assert (rows.shape, scalars.shape) == ((2 * (8 + 8 + 24 + 24), 32), (2 * (2 + 2), 32))
    for head in range(2):
        own, both = rows[64 * head : 64 * (head + 1)], slice(2 * head, 2 * head + 2)
        parts = [layer[f"linear_{name}"][:, head] for name in "qk"]
        parts += [layer[f"linear_{name}"][:, both].reshape(32, -1) for name in "vz"]
        np.testing.assert_array_equal(own, np.concatenate(parts, axis=1).T)
        rate_and_decay = [layer[name][:, both] for name in ("linear_rate", "linear_decay")]
        np.testing.assert_array_equal(scalars[4 * head : 4 * (head + 1)], np.concatenate(rate_and_decay, axis=1).T)


@pytest.mark.parametrize("family", ["qwen3_5", "qwen3_next"])
def test_a_golden_is_saved_as_the_golden_from_shards_too(tmp_path, family):
    config, host = hf.load(GOLDENS / family)
    shardings = mesh.param_shardings(mesh.make_mesh(1, 2, 2), decoder.axes(config), "learner")
    _, placed = hf.load(GOLDENS / family, shardings=shardings)
    assert_same(placed, host)
    assert placed["layers"]["0"]["linear_v"].addressable_shards[0].data.shape == (16, 2, 12)
    assert placed["layers"]["0"]["conv_k"].addressable_shards[0].data.shape == (4, 1, 8)
    golden = safetensors.numpy.load_file(GOLDENS / family / "model.safetensors")
    for name, params in (("host", host), ("placed", placed)):
        hf.save(tmp_path / name, config, params, dtype="bfloat16")
        saved = safetensors.numpy.load_file(tmp_path / name / "model.safetensors")
        assert saved.keys() == golden.keys()
        assert all(saved[tensor].tobytes() == golden[tensor].tobytes() for tensor in golden)


def test_decays_and_norms_may_be_wider_than_the_other_weights(tmp_path):
    shutil.copytree(GOLDEN, tmp_path / "out")

    def widened(config, tensors):
        for name in (f"{LINEAR}.A_log", f"{LINEAR}.norm.weight", f"{LINEAR}.dt_bias"):
            tensors[name] = tensors[name].astype(np.float32) + np.float32(1e-5)

    config, params = hf.load(edited(tmp_path / "out", widened), dtype=None)
    layer = params["layers"]["0"]
    assert {layer[name].dtype for name in ("a_log", "linear_norm", "dt_bias")} == {np.dtype(np.float32)}
    assert layer["linear_q"].dtype == ml_dtypes.bfloat16
    assert hf.stored_dtype(tmp_path / "out") == "float32"
    hf.save(tmp_path / "again", config, params)
    assert_same(hf.load(tmp_path / "again")[1], jax.tree.map(lambda leaf: leaf.astype(np.float32), params))


def test_layers_that_propose_tokens_are_not_trained_and_a_line_says_so(tmp_path):
    shutil.copytree(GOLDEN, tmp_path / "out")
    longer = edited(
        tmp_path / "out", lambda c, t: t.update({"mtp.layers.0.mlp.up_proj.weight": np.zeros((2, 3), np.float32)})
    )
    assert_same(hf.load(longer)[1], hf.load(GOLDEN)[1])
    (line,) = hf.remarks(longer)
    assert line.endswith(
        "its layers mtp.*, which propose several tokens at once, are not trained; they are saved as they are"
    )
    assert hf.remarks(GOLDEN) == []


def test_a_number_that_is_not_finite_is_named_by_its_tensor(tmp_path):
    """Of leaves that share one, each looks at its own rows."""
    shutil.copytree(GOLDEN, tmp_path / "out")
    wrong = edited(tmp_path / "out", lambda c, t: t[f"{LINEAR}.in_proj_qkv.weight"].__setitem__((50, 3), np.inf))
    refused(rf"tensor {LINEAR}.in_proj_qkv.weight .*\[50, 3\]", hf.load, wrong)
    short = edited(
        tmp_path / "out", lambda c, t: t.update({f"{LINEAR}.conv1d.weight": np.zeros((79, 1, 4), np.float32)})
    )
    refused(r"conv1d.weight has shape \(79, 1, 4\), expected \(80, 1, 4\)", hf.load, short)
