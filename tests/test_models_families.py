"""Every family's config.json and names: back and forth, published ones, and what no family expresses."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import jax
import numpy as np
import pytest
import safetensors.numpy
from refusals import refused
from test_models_hf import SQUARE, TINY, assert_same, shaken

from jaxrl_post.models import decoder, families, hf
from jaxrl_post.models.model_config import Experts, FullAttention, LinearAttention, RopeScaling, frequencies, turn_scale
from jaxrl_post.models.presets import published

GEMMA = dataclasses.replace(
    TINY, norm_offset=1.0, post_norms=True, embed_scale=32**0.5, windows=(7, None), activation="gelu_tanh"
)
FAMILIES = [
    dataclasses.replace(TINY, windows=(5, 5)),
    dataclasses.replace(TINY, qkv_bias=True),
    dataclasses.replace(TINY, qkv_bias=True, windows=(None, 6)),
    dataclasses.replace(TINY, qk_norm=True, windows=(6, None)),
    dataclasses.replace(GEMMA, query_scale=12**-0.5, attn_soft_cap=3.0, final_soft_cap=4.0, tied=False),
    dataclasses.replace(
        GEMMA, query_scale=8**-0.5, qk_norm=True, local_rope_theta=77.0, rope_scaling=RopeScaling("linear", 8.0)
    ),
    dataclasses.replace(
        GEMMA,
        layers=4,
        windows=(7, None) * 2,
        norm_offset=0.0,
        qk_norm=True,
        query_scale=1.0,
        local_rope_theta=77.0,
        rope_scaling=None,
        full=FullAttention(1, 12, values_are_keys=True, turned=0.25),
        shared_layers=2,
        shared_ffw=2 * GEMMA.ffw,
        v_norm=True,
        layer_scalars=True,
        layer_embeds=6,
    ),
    dataclasses.replace(
        GEMMA,
        norm_offset=0.0,
        qk_norm=True,
        query_scale=1.0,
        local_rope_theta=77.0,
        full=FullAttention(2, 8),
        v_norm=True,
        layer_scalars=True,
        experts=Experts(3, 2, 20, beside=True),
    ),
    dataclasses.replace(TINY, qkv_bias=True, windows=(6, None), experts=Experts(3, 2, 20, False, shared_ffw=12)),
    dataclasses.replace(TINY, qk_norm=True, windows=(6, 6), experts=Experts(4, 2, 32, dense_layers=(1,))),
    dataclasses.replace(TINY, ffw=20, experts=Experts(3, 1, 20)),
    dataclasses.replace(
        TINY,
        layers=3,
        windows=(),
        norm_offset=1.0,
        qk_norm=True,
        attn_gate=True,
        rotary_dim=4,
        linear=LinearAttention(2, 4, 6, 5, 3, (0, 1)),
    ),
]
FAMILIES += [
    dataclasses.replace(FAMILIES[-1], experts=Experts(3, 2, 20, shared_ffw=12)),
    dataclasses.replace(FAMILIES[-1], experts=Experts(3, 2, 20, False, shared_ffw=12, dense_layers=(0,))),
]
KINDS = [
    "mistral",
    "qwen2",
    "qwen2",
    "qwen3",
    "gemma2",
    "gemma3_text",
    "gemma4_text",
    "gemma4_text",
    "qwen2_moe",
    "qwen3_moe",
    "mixtral",
    "qwen3_5_text",
    "qwen3_5_moe_text",
    "qwen3_next",
]


@pytest.mark.parametrize(
    "config, kind", list(zip(FAMILIES, KINDS, strict=True)), ids=[f"{at}_{kind}" for at, kind in enumerate(KINDS)]
)
def test_families_come_back_from_several_files_as_they_went(tmp_path, config, kind):
    params = shaken(config)
    hf.check_savable(config)
    hf.save(tmp_path / "out", config, params, max_file_bytes=20_000)
    assert json.loads((tmp_path / "out" / "config.json").read_text())["model_type"] == kind
    again, loaded = hf.load(tmp_path / "out")
    assert again == config
    assert_same(loaded, params)
    index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
    files = sorted((tmp_path / "out").glob("*.safetensors"))
    assert [file.name for file in files] == sorted(set(index["weight_map"].values())) and len(files) > 2
    theirs = {name: tensor for file in files for name, tensor in safetensors.numpy.load_file(file).items()}
    assert {name: file.name for file in files for name in safetensors.numpy.load_file(file)} == index["weight_map"]
    assert index["metadata"]["total_size"] == sum(tensor.nbytes for tensor in theirs.values())
    assert all(
        sum(t.nbytes for t in tensors.values()) <= 20_000 or len(tensors) == 1
        for tensors in map(safetensors.numpy.load_file, files)
    )


# As they lie on the Hub, less what says nothing of the shape; then the number of parameters that is published. Of Gemma 4 it is
# that of the text model, with the numbers of its layers, as transformers 5.24.0 counts it.
PUBLISHED = {
    "gemma-2-2b": (
        """{"architectures": ["Gemma2ForCausalLM"], "attention_bias": false, "attn_logit_softcapping": 50.0,
        "final_logit_softcapping": 30.0, "head_dim": 256, "hidden_act": "gelu_pytorch_tanh",
        "hidden_activation": "gelu_pytorch_tanh", "hidden_size": 2304, "intermediate_size": 9216,
        "max_position_embeddings": 8192, "model_type": "gemma2", "num_attention_heads": 8, "num_hidden_layers": 26,
        "num_key_value_heads": 4, "query_pre_attn_scalar": 256, "rms_norm_eps": 1e-06, "rope_theta": 10000.0,
        "sliding_window": 4096, "torch_dtype": "float32", "vocab_size": 256000}""",
        2_614_341_888,
        (4096, None) * 13,
    ),
    "gemma-3-1b": (
        """{"architectures": ["Gemma3ForCausalLM"], "attention_bias": false, "attn_logit_softcapping": null,
        "final_logit_softcapping": null, "head_dim": 256, "hidden_activation": "gelu_pytorch_tanh", "hidden_size": 1152,
        "intermediate_size": 6912, "max_position_embeddings": 32768, "model_type": "gemma3_text",
        "num_attention_heads": 4, "num_hidden_layers": 26, "num_key_value_heads": 1, "query_pre_attn_scalar": 256,
        "rms_norm_eps": 1e-06, "rope_local_base_freq": 10000, "rope_scaling": null, "rope_theta": 1000000,
        "sliding_window": 512, "sliding_window_pattern": 6, "torch_dtype": "bfloat16", "vocab_size": 262144}""",
        999_885_952,
        ((512,) * 5 + (None,)) * 4 + (512, 512),
    ),
    "gemma-4-e2b": (
        """{"architectures": ["Gemma4ForCausalLM"], "attention_bias": false, "attention_k_eq_v": false,
        "enable_moe_block": false, "final_logit_softcapping": 30.0, "global_head_dim": 512, "head_dim": 256,
        "hidden_activation": "gelu_pytorch_tanh", "hidden_size": 1536, "hidden_size_per_layer_input": 256,
        "intermediate_size": 6144, "layer_types": ["sliding_attention", "sliding_attention", "sliding_attention",
        "sliding_attention", "full_attention", "sliding_attention", "sliding_attention", "sliding_attention",
        "sliding_attention", "full_attention", "sliding_attention", "sliding_attention", "sliding_attention",
        "sliding_attention", "full_attention", "sliding_attention", "sliding_attention", "sliding_attention",
        "sliding_attention", "full_attention", "sliding_attention", "sliding_attention", "sliding_attention",
        "sliding_attention", "full_attention", "sliding_attention", "sliding_attention", "sliding_attention",
        "sliding_attention", "full_attention", "sliding_attention", "sliding_attention", "sliding_attention",
        "sliding_attention", "full_attention"], "max_position_embeddings": 131072, "model_type": "gemma4_text",
        "moe_intermediate_size": null, "num_attention_heads": 8, "num_experts": null, "num_global_key_value_heads": null,
        "num_hidden_layers": 35, "num_key_value_heads": 1, "num_kv_shared_layers": 20, "rms_norm_eps": 1e-06,
        "rope_parameters": {"full_attention": {"partial_rotary_factor": 0.25, "rope_theta": 1000000.0,
        "rope_type": "proportional"}, "sliding_attention": {"rope_theta": 10000.0, "rope_type": "default"}},
        "sliding_window": 512, "tie_word_embeddings": true, "top_k_experts": null, "use_bidirectional_attention": null,
        "use_double_wide_mlp": true, "vocab_size": 262144, "vocab_size_per_layer_input": 262144}""",
        4_628_569_379,
        ((512,) * 4 + (None,)) * 7,
    ),
    "gemma-4-26b-a4b": (
        """{"architectures": ["Gemma4ForCausalLM"], "attention_bias": false, "attention_k_eq_v": true, "enable_moe_block": true,
        "final_logit_softcapping": 30.0, "global_head_dim": 512, "head_dim": 256, "hidden_activation": "gelu_pytorch_tanh",
        "hidden_size": 2816, "hidden_size_per_layer_input": 0, "intermediate_size": 2112, "max_position_embeddings": 262144,
        "model_type": "gemma4_text", "moe_intermediate_size": 704, "num_attention_heads": 16, "num_experts": 128,
        "num_global_key_value_heads": 2, "num_hidden_layers": 30, "num_key_value_heads": 8, "num_kv_shared_layers": 0,
        "rms_norm_eps": 1e-06, "rope_parameters": {"full_attention": {"partial_rotary_factor": 0.25,
        "rope_theta": 1000000.0, "rope_type": "proportional"}, "sliding_attention": {"rope_theta": 10000.0,
        "rope_type": "default"}}, "sliding_window": 1024, "tie_word_embeddings": true, "top_k_experts": 8,
        "use_bidirectional_attention": "vision", "use_double_wide_mlp": false, "vocab_size": 262144,
        "vocab_size_per_layer_input": 262144}""",
        25_233_141_790,
        ((1024,) * 5 + (None,)) * 5,
    ),
    "mistral-7b-v0.1": (
        """{"architectures": ["MistralForCausalLM"], "hidden_act": "silu", "hidden_size": 4096, "intermediate_size": 14336,
        "max_position_embeddings": 32768, "model_type": "mistral", "num_attention_heads": 32, "num_hidden_layers": 32,
        "num_key_value_heads": 8, "rms_norm_eps": 1e-05, "rope_theta": 10000.0, "sliding_window": 4096,
        "tie_word_embeddings": false, "torch_dtype": "bfloat16", "vocab_size": 32000}""",
        7_241_732_096,
        (4096,) * 32,
    ),
    "qwen2.5-0.5b": (
        """{"architectures": ["Qwen2ForCausalLM"], "hidden_act": "silu", "hidden_size": 896, "intermediate_size": 4864,
        "max_position_embeddings": 32768, "max_window_layers": 24, "model_type": "qwen2", "num_attention_heads": 14,
        "num_hidden_layers": 24, "num_key_value_heads": 2, "rms_norm_eps": 1e-06, "rope_theta": 1000000.0,
        "sliding_window": 32768, "tie_word_embeddings": true, "torch_dtype": "bfloat16", "use_mrope": false,
        "use_sliding_window": false, "vocab_size": 151936}""",
        494_032_768,
        (None,) * 24,
    ),
    "llama-2-7b": (
        """{"architectures": ["LlamaForCausalLM"], "hidden_act": "silu", "hidden_size": 4096, "intermediate_size": 11008,
        "max_position_embeddings": 4096, "model_type": "llama", "num_attention_heads": 32, "num_hidden_layers": 32,
        "num_key_value_heads": 32, "pretraining_tp": 1, "rms_norm_eps": 1e-05, "rope_scaling": null,
        "tie_word_embeddings": false, "torch_dtype": "float16", "vocab_size": 32000}""",
        6_738_415_616,
        (None,) * 32,
    ),
    "qwen1.5-moe-a2.7b": (
        """{"architectures": ["Qwen2MoeForCausalLM"], "decoder_sparse_step": 1, "hidden_act": "silu", "hidden_size": 2048,
        "intermediate_size": 5632, "max_position_embeddings": 8192, "max_window_layers": 21, "model_type": "qwen2_moe",
        "moe_intermediate_size": 1408, "norm_topk_prob": false, "num_attention_heads": 16, "num_experts": 60,
        "num_experts_per_tok": 4, "num_hidden_layers": 24, "num_key_value_heads": 16, "output_router_logits": false,
        "rms_norm_eps": 1e-06, "rope_theta": 1000000.0, "router_aux_loss_coef": 0.001,
        "shared_expert_intermediate_size": 5632, "sliding_window": 32768, "tie_word_embeddings": false,
        "torch_dtype": "bfloat16", "use_sliding_window": false, "vocab_size": 151936}""",
        14_315_784_192,
        (None,) * 24,
    ),
    "qwen3-30b-a3b": (
        """{"architectures": ["Qwen3MoeForCausalLM"], "attention_bias": false, "decoder_sparse_step": 1, "head_dim": 128,
        "hidden_act": "silu", "hidden_size": 2048, "intermediate_size": 6144, "max_position_embeddings": 40960,
        "max_window_layers": 48, "mlp_only_layers": [], "model_type": "qwen3_moe", "moe_intermediate_size": 768,
        "norm_topk_prob": true, "num_attention_heads": 32, "num_experts": 128, "num_experts_per_tok": 8,
        "num_hidden_layers": 48, "num_key_value_heads": 4, "output_router_logits": false, "rms_norm_eps": 1e-06,
        "rope_scaling": null, "rope_theta": 1000000.0, "router_aux_loss_coef": 0.001, "sliding_window": null,
        "tie_word_embeddings": false, "torch_dtype": "bfloat16", "use_sliding_window": false, "vocab_size": 151936}""",
        30_532_122_624,
        (None,) * 48,
    ),
    "gpt-oss-20b": (
        """{"architectures": ["GptOssForCausalLM"], "attention_bias": true, "experts_per_token": 4, "head_dim": 64,
        "hidden_act": "silu", "hidden_size": 2880, "initial_context_length": 4096, "intermediate_size": 2880,
        "max_position_embeddings": 131072, "model_type": "gpt_oss", "num_attention_heads": 64, "num_experts_per_tok": 4,
        "num_hidden_layers": 24, "num_key_value_heads": 8, "num_local_experts": 32, "output_router_logits": false,
        "quantization_config": {"modules_to_not_convert": ["model.layers.*.self_attn", "lm_head"], "quant_method": "mxfp4"},
        "rms_norm_eps": 1e-05, "rope_scaling": {"beta_fast": 32.0, "beta_slow": 1.0, "factor": 32.0,
        "original_max_position_embeddings": 4096, "rope_type": "yarn", "truncate": false}, "rope_theta": 150000,
        "router_aux_loss_coef": 0.9, "sliding_window": 128, "swiglu_limit": 7.0, "tie_word_embeddings": false,
        "vocab_size": 201088}""",
        20_914_757_184,
        (128, None) * 12,
    ),
    "mixtral-8x7b-v0.1": (
        """{"architectures": ["MixtralForCausalLM"], "hidden_act": "silu", "hidden_size": 4096, "intermediate_size": 14336,
        "max_position_embeddings": 32768, "model_type": "mixtral", "num_attention_heads": 32, "num_experts_per_tok": 2,
        "num_hidden_layers": 32, "num_key_value_heads": 8, "num_local_experts": 8, "output_router_logits": false,
        "rms_norm_eps": 1e-05, "rope_theta": 1000000.0, "router_aux_loss_coef": 0.02, "sliding_window": null,
        "tie_word_embeddings": false, "torch_dtype": "bfloat16", "vocab_size": 32000}""",
        46_702_792_704,
        (None,) * 32,
    ),
}
PUBLISHED = {name: (json.loads(config), *facts) for name, (config, *facts) in PUBLISHED.items()}


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_configs_have_the_published_number_of_parameters(tmp_path, name):
    given, count, windows = PUBLISHED[name]
    (tmp_path / "config.json").write_text(json.dumps(given))
    config = hf.read_config(tmp_path / "config.json")
    assert sum(leaf.size for leaf in jax.tree.leaves(decoder.abstract(config))) == count
    assert config.windows == windows
    hf.check_savable(config)
    if name.startswith("gemma-4"):
        assert published(name) == config


@pytest.mark.parametrize(
    "change, sentence",
    [
        (
            dict(qk_norm=True, qkv_bias=True),
            "qk_norm=True cannot be saved as Qwen2ForCausalLM, which is the nearest of Ll",
        ),
        (dict(windows=(3, 4)), r"windows=\(3, 4\) cannot be saved as LlamaForCausalLM"),
        (dict(windows=(None, 4)), r"windows=\(None, 4\) cannot be saved as LlamaForCausalLM"),
        (dict(query_scale=0.4), "query_scale=0.4 cannot be saved"),
        (dict(sinks=True), "sinks=True cannot be saved as LlamaForCausalLM"),
        (dict(o_bias=True), "o_bias=True cannot be saved as LlamaForCausalLM"),
        (dict(post_norms=True, norm_offset=1.0), "embed_scale=1.0 cannot be saved as Gemma2ForCausalLM"),
        (
            dict(embed=9, post_norms=True, norm_offset=1.0, embed_scale=3.0),
            r"embed=9 \(no multiple of heads=2\) cannot be saved as Gemma2",
        ),
    ],
)
def test_what_no_family_expresses_is_not_saved(tmp_path, change, sentence):
    config = dataclasses.replace(SQUARE, **change)
    refused(sentence, hf.check_savable, config)
    refused(sentence, hf.save, tmp_path / "out", config, shaken(config))
    assert list(tmp_path.iterdir()) == []


def read_as(tmp_path, **changed):
    """A published config.json, changed, as a ModelConfig."""
    (tmp_path / "config.json").write_text(json.dumps(changed))
    return families.read(tmp_path / "config.json")


def test_gemma_3_with_capped_attention_is_refused_both_ways(tmp_path):
    """transformers has the key and ignores it there: scores that were capped would be another model's."""
    published = PUBLISHED["gemma-3-1b"][0]
    sentence = "attn_logit_softcapping=50.0 is not supported for Gemma3ForCausalLM, .* the nearest valid value is null"
    refused(sentence, read_as, tmp_path, **published | {"attn_logit_softcapping": 50.0})
    config = read_as(tmp_path, **published | {"final_logit_softcapping": 30.0})
    assert (config.attn_soft_cap, config.final_soft_cap) == (None, 30.0)
    with pytest.raises(ValueError, match="attn_soft_cap=50.0 cannot be saved as Gemma3ForCausalLM"):
        families.write(dataclasses.replace(config, attn_soft_cap=50.0))


def test_embeddings_of_each_layer_need_a_row_for_every_token(tmp_path):
    published = PUBLISHED["gemma-4-e2b"][0]
    refused(
        "vocab_size_per_layer_input=262400 is not supported; it must be vocab_size=262144",
        read_as, tmp_path, **published | {"vocab_size_per_layer_input": 262400},
    )  # fmt: skip
    assert read_as(tmp_path, **published | {"hidden_size_per_layer_input": None}).layer_embeds == 0


def test_keys_and_values_that_no_layer_reads_are_left_out(tmp_path):
    """Files of Google have them for layers that read those of others. Any other tensor is refused."""
    config = next(one for one in FAMILIES if one.shared_layers)
    hf.save(tmp_path / "out", config, shaken(config))
    file = tmp_path / "out" / "model.safetensors"
    tensors = safetensors.numpy.load_file(file)
    more = {
        name.replace("layers.0", "layers.3"): one
        for name, one in tensors.items()
        if "k_proj" in name or "k_norm" in name
    }
    safetensors.numpy.save_file(tensors | more, file)
    assert_same(hf.load(tmp_path / "out")[1], shaken(config))
    safetensors.numpy.save_file(tensors | {"model.layers.3.self_attn.k_scale": tensors["model.norm.weight"]}, file)
    refused("tensor model.layers.3.self_attn.k_scale of shape .* is not part of this", hf.load, tmp_path / "out")


def test_a_mistral_without_a_window_stays_a_mistral(tmp_path):
    config = read_as(tmp_path, **PUBLISHED["mistral-7b-v0.1"][0] | {"sliding_window": None})
    assert set(config.windows) == {None}
    about = families.write(config)
    assert (about["architectures"], about["sliding_window"]) == (["MistralForCausalLM"], None)
    assert read_as(tmp_path, **about) == config
    plain = dataclasses.replace(config, family="")  # of its own making: the first family that computes the same
    assert plain == config and families.write(plain)["architectures"] == ["LlamaForCausalLM"]
    biased = dataclasses.replace(config, qkv_bias=True)  # no Mistral any more
    assert families.write(biased)["architectures"] == ["Qwen2ForCausalLM"]


# The keys beside a plain model of heads of 16; then angles per position and factor of the cosines, as they come from
# ROPE_INIT_FUNCTIONS of transformers 5.24.0 in float32 at the whole length. The first two are Qwen 2.5's and gpt-oss's.
LONGROPE = {"rope_type": "longrope", "rope_theta": 1e4, "original_max_position_embeddings": 4096,
  "short_factor": [1, 1.05, 1.1, 1.3, 1.5, 1.8, 2.1, 2.5], "long_factor": [1.1, 1.4, 2.2, 4.5, 9, 17, 28, 32.5]}  # fmt: skip
YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 2.5}
LONG = [0.9090909, 0.225877, 0.04545455, 0.007027284, 0.001111111, 0.0001860163, 3.571429e-05, 9.730085e-06]
ROPES = {
    "yarn": (131072, YARN | {"rope_theta": 1e6, "factor": 4, "original_max_position_embeddings": 32768},
      [1, 0.1778279, 0.03162278, 0.00421756, 0.0005, 4.445699e-05, 7.905694e-06, 1.405853e-06], 1.1386294),
    "yarn, smooth": (131072, YARN | {"rope_theta": 150000, "factor": 32, "original_max_position_embeddings": 4096,
      "truncate": False, "beta_fast": 32, "beta_slow": 1},
      [1, 0.225418, 0.05081327, 0.006794959, 0.0004564839, 1.818834e-05, 4.099978e-06, 9.24209e-07], 1.3465736),
    "yarn, mscale": (163840, YARN | {"factor": 40, "original_max_position_embeddings": 4096, "beta_fast": 16,
      "beta_slow": 2, "mscale": 1, "mscale_all_dim": 0.5},
      [1, 0.3162278, 0.1, 0.03162278, 0.006749999, 0.001106797, 2.5e-05, 7.905694e-06], 1.155722),
    "yarn, attention_factor": (16384, YARN | {"original_max_position_embeddings": 8192, "attention_factor": 0.75},
      [1, 0.3162278, 0.1, 0.03162278, 0.0085, 0.002213595, 0.00055, 0.0001264911], 0.75),
    "yarn, no original length": (4096, YARN | {"mscale": None},
      [1, 0.3162278, 0.1, 0.02687936, 0.007, 0.001739253, 0.0004, 0.0001264911], 1.0916291),
    "yarn, one bound": (4096, YARN | {"factor": 8, "original_max_position_embeddings": 1024, "beta_fast": 4,
      "beta_slow": 4, "truncate": False},
      [1, 0.3162278, 0.1, 0.03162278, 0.00125, 0.0003952847, 0.000125, 3.952847e-05], 1.2079442),
    "longrope": (131072, LONGROPE, LONG, 1.1902381),
    "longrope, factor": (131072, LONGROPE | {"factor": 8}, LONG, 1.118034),
    "longrope, attention_factor": (131072, LONGROPE | {"attention_factor": 1.3}, LONG, 1.3),
    "longrope, short": (4096, LONGROPE,
      [1, 0.3011693, 0.09090909, 0.02432521, 0.006666667, 0.001756821, 0.0004761905, 0.0001264911], 1),
    "dynamic": (4096, {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 4},
      [1, 0.3162278, 0.1, 0.03162278, 0.01, 0.003162278, 0.001, 0.0003162278], 1),
}  # fmt: skip


@pytest.mark.parametrize("name", ROPES)
def test_rotations_are_those_of_transformers(tmp_path, name):
    length, rope, steps, scale = ROPES[name]
    plain = {key: value for key, value in PUBLISHED["llama-2-7b"][0].items() if not key.startswith("rope")}
    plain |= {"head_dim": 16, "max_position_embeddings": length}
    config = read_as(tmp_path, **plain, rope_parameters=rope)
    np.testing.assert_allclose(frequencies(config, 0), steps, rtol=3e-7)
    assert turn_scale(config, 0) == pytest.approx(scale, rel=1e-7)
    older = {key: value for key, value in rope.items() if key not in ("rope_theta", "rope_type")}
    older = {"rope_theta": rope["rope_theta"], "rope_scaling": {"type": rope["rope_type"], **older}}
    assert read_as(tmp_path, **plain, **older) == config


def test_an_original_length_beside_the_rope_parameters_goes_first(tmp_path):
    beside = {"original_max_position_embeddings": 1024}
    for name, about in (
        ("llama-2-7b", YARN),
        ("llama-2-7b", LONGROPE | {"short_factor": [2] * 64, "long_factor": [3] * 64}),
    ):
        both = PUBLISHED[name][0] | {"rope_scaling": about | {"original_max_position_embeddings": 2048}} | beside
        assert read_as(tmp_path, **both).rope_scaling.original_length == 1024
    both = PUBLISHED["gemma-3-1b"][0] | {"rope_scaling": YARN} | beside
    assert read_as(tmp_path, **both).rope_scaling.original_length == 32768  # its two sets have no such key beside them


OWN_ROTATION = {"gemma4_text": "Gemma4ForCausalLM", "qwen3_5_text": "Qwen3_5ForCausalLM"}
OWN_ROTATION |= {"qwen3_5_moe_text": "Qwen3_5MoeForCausalLM", "qwen3_next": "Qwen3NextForCausalLM"}
HALF = TINY.head_dim // 2
SCALINGS = {
    "linear": RopeScaling("linear", 2.0),
    "llama3": RopeScaling("llama3", 8.0, 1.5, 3.0, 99),
    "yarn": RopeScaling("yarn", 4.0, original_length=64, beta_fast=9.0, beta_slow=0.5),
    "yarn, attention_factor": RopeScaling("yarn", 4.0, original_length=64, attention_factor=0.9),
    "dynamic": RopeScaling("dynamic", 4.0),
    "longrope": RopeScaling(
        "longrope", 4.0, original_length=64, short_factors=(1.5,) * HALF, long_factors=tuple(range(1, HALF + 1))
    ),
}


@pytest.mark.parametrize("name", SCALINGS)
def test_every_family_keeps_every_kind_of_rotation(tmp_path, name):
    others = (config for config, kind in zip(FAMILIES, KINDS, strict=True) if kind not in OWN_ROTATION)
    for config in (TINY, *others):
        config = dataclasses.replace(config, rope_scaling=SCALINGS[name])
        assert read_as(tmp_path, **families.write(config)) == config
        hash(config)


def test_smooth_yarn_is_kept_but_refused_for_gemma_3_both_ways(tmp_path):
    """transformers 5.24 computes as if the key were absent where the layers have two rotations."""
    smooth = SCALINGS["yarn"]._replace(truncate=False)
    for config, kind in zip((TINY, *FAMILIES), ("llama", *KINDS), strict=True):
        config = dataclasses.replace(config, rope_scaling=smooth)
        if kind in OWN_ROTATION:
            refused(f"rope_scaling=.* cannot be saved as {OWN_ROTATION[kind]}", families.write, config)
        elif kind == "gemma3_text":
            refused("rope_scaling.truncate=False cannot be saved as Gemma3ForCausalLM", families.write, config)
        else:
            assert read_as(tmp_path, **families.write(config)) == config
    given = PUBLISHED["gemma-3-1b"][0] | {"rope_scaling": YARN | {"truncate": False}}
    refused("truncate=False is not supported for Gemma3ForCausalLM, .* value is true", read_as, tmp_path, **given)


def rope_of_golden(**about):
    return {"rope_parameters": {"rope_theta": 1e4, **about}}


def longrope_of_golden(**about):
    return rope_of_golden(**LONGROPE | {"short_factor": [1] * 4, "long_factor": [2] * 4} | about)


WRONG = [
    ("llama2", {"architectures": 5}, "architectures must be a list of texts, got 5"),
    ("llama2", {"architectures": [["a"]]}, "architectures must be a list of texts"),
    ("llama2", {"architectures": [], "model_type": {"a": 1}}, "architecture {'a': 1} is not read"),
    ("llama2", {"hidden_act": ["silu"]}, "hidden_act=.*is not one of silu"),
    ("llama2", {"num_hidden_layers": 10**9}, "num_hidden_layers=1000000000 is more than 4096"),
    ("llama2", {"vocab_size": 10**30}, "vocab_size=10+ is more than 16777216"),
    ("llama2", {"rms_norm_eps": float("nan")}, "rms_norm_eps=nan must be from 0 to 1"),
    ("llama2", {"rms_norm_eps": -1}, "rms_norm_eps=-1 must be from 0 to 1; nearest is 0"),
    ("llama2", {"rope_parameters": [1]}, r"rope_parameters must be an object, got \[1\]"),
    ("llama2", {"rope_parameters": {"rope_theta": 10**400}}, "rope_theta=1.*must be from 0 to 1e"),
    ("llama2", {"rope_parameters": {"rope_theta": 0}}, "rope_theta=0 must be above 0"),
    ("llama2", {"rope_parameters": {"rope_type": ["linear"]}}, r"rope type \['linear'\] is not one of"),
    ("llama2", {"tie_word_embeddings": "false"}, "tie_word_embeddings must be true or false, got 'false'"),
    ("llama2", {"head_dim": None, "num_attention_heads": 64, "num_key_value_heads": 64}, "head_dim must be at least 1"),
    ("llama2", {"head_dim": 7}, "config.json: head_dim=7 must be even"),
    ("llama2", {"num_key_value_heads": 3}, "config.json: heads=4 must be a multiple of kv_heads=3"),
    ("qwen3", {"layer_types": 7}, "layer_types must be a list of texts, got 7"),
    ("qwen3", {"layer_types": [{}]}, "layer_types must be a list of texts"),
    ("qwen3", {"use_sliding_window": "no"}, "use_sliding_window must be true or false"),
    ("gemma2", {"query_pre_attn_scalar": 0}, "query_pre_attn_scalar=0 must be from 1 to"),
    ("gemma2", {"attn_logit_softcapping": 0}, "attn_logit_softcapping=0 must be above 0"),
    ("gemma3", {"rope_parameters": {"sliding_attention": 5}}, "sliding_attention must be an object, got 5"),
    ("llama3", {"rope_parameters": {"rope_type": "llama3", "rope_theta": 1.0, "factor": 8, "low_freq_factor": 4,
      "high_freq_factor": 4, "original_max_position_embeddings": 8}}, "high_freq_factor=4 must be above 4"),
    ("mixtral", {"num_experts_per_tok": 9}, "num_experts_per_tok=9 is more than the 8 experts; the nearest valid value is 8"),
    ("mixtral", {"num_local_experts": 1 << 17}, "num_local_experts=131072 is more than 65536"),
    ("gemma4_moe", {"top_k_experts": 6}, "top_k_experts=6 is more than the 5 experts; the nearest valid value is 5"),
    ("gemma4_moe", {"num_experts": None}, "num_experts must be a whole number of at least 1, got None"),
    ("gemma4_embeds", {"hidden_size_per_layer_input": -8}, "hidden_size_per_layer_input must be a whole number of at least 1"),
    ("qwen2_moe", {"norm_topk_prob": "no"}, "norm_topk_prob must be true or false, got 'no'"),
    ("qwen2_moe", {"shared_expert_intermediate_size": 0}, "shared_expert_intermediate_size must be a whole number of at"),
    ("qwen3_moe", {"mlp_only_layers": [3]}, r"mlp_only_layers=\[3\] must be a list of layers from 0 to 2"),
    ("qwen3_moe", {"decoder_sparse_step": 4}, "leave none of 3 layers with experts; a model without experts is a qwen3$"),
    ("llama2", rope_of_golden(rope_type="yarn"), "factor must be a number, got None"),
    ("llama2", rope_of_golden(rope_type="yarn", factor=0.5), "factor=0.5 must be from 1 to .* nearest is 1"),
    ("llama2", rope_of_golden(rope_type="yarn", factor=-2), "factor=-2 must be from 1 to .* nearest is 1"),
    ("llama2", rope_of_golden(rope_type="yarn", factor=2, attention_factor=0), "attention_factor=0 must be above 0"),
    ("llama2", rope_of_golden(rope_type="yarn", factor=2, mscale="1"), "mscale must be a number, got '1'"),
    ("llama2", rope_of_golden(rope_type="yarn", factor=2, truncate=1), "truncate must be true or false, got 1"),
    ("llama2", rope_of_golden(rope_type="yarn", factor=2, beta_slow=0), "beta_slow=0 must be from 0.001 to"),
    ("llama2", rope_of_golden(rope_type="yarn", factor=2, beta_fast=2, beta_slow=3), "beta_fast=2 must be from 3 to"),
    ("llama2", rope_of_golden(rope_type="yarn", factor=2, original_max_position_embeddings=0),
      "original_max_position_embeddings must be a whole number of at least 1, got 0"),
    ("llama2", rope_of_golden(rope_type="yarn", factor=2, rope_theta=1), "config.json: rope_theta=1 must be above 1"),
    ("llama2", rope_of_golden(rope_type="dynamic"), "factor must be a number, got None"),
    ("llama2", rope_of_golden(rope_type="dynamic", factor=2, original_max_position_embeddings=32),
      "max_position_embeddings=64 is beyond original_max_position_embeddings=32, .* nearest valid value is 32"),
    ("llama2", longrope_of_golden(long_factor=None), "long_factor must be a list of numbers, got None"),
    ("llama2", longrope_of_golden(short_factor=[1, 1, -1, 1]), "short_factor=-1 must be from 0 to"),
    ("llama2", longrope_of_golden(short_factor=[1, 1, "1", 1]), "short_factor must be a number, got '1'"),
    ("llama2", longrope_of_golden(short_factor=[1] * 3), "config.json: longrope has 3 short factors, expected 4"),
    ("llama2", longrope_of_golden(factor=0.5), "factor=0.5 must be from 1 to"),
    ("llama2", longrope_of_golden(original_max_position_embeddings=1), "original length 1 of longrope must be at least 2"),
]  # fmt: skip


@pytest.mark.parametrize("family, change, sentence", WRONG, ids=range(len(WRONG)))
def test_a_malformed_config_is_one_sentence_with_file_and_key(tmp_path, family, change, sentence):
    given = json.loads((Path(__file__).parent / "goldens" / family / "config.json").read_text()) | change
    file = tmp_path / "config.json"
    file.write_text(json.dumps({key: value for key, value in given.items() if value is not None}))
    with pytest.raises(ValueError, match=sentence) as caught:
        hf.read_config(file)
    text = str(caught.value)
    assert type(caught.value) is ValueError and str(file) in text and "\n" not in text and len(text) < 500
