"""Hugging Face directories: scores equal those of transformers, and what is written comes back to the bit."""

from __future__ import annotations

import dataclasses
import errno
import gc
import json
import os
import shutil
import weakref
from pathlib import Path

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
import safetensors.numpy
from refusals import refused

from jaxrl_post.models import decoder, hf, tensor_file
from jaxrl_post.models.model_config import ModelConfig, RopeScaling
from jaxrl_post.models.presets import PRESETS
from jaxrl_post.parallel import mesh, processes
from tests import numpy_llama
from tests.dense_attend import dense

GOLDENS = Path(__file__).parent / "goldens"  # written by transformers 5 through scripts/make_goldens.py
GOLDEN = GOLDENS / "llama2"
TINY = PRESETS["tiny"]
SQUARE = ModelConfig(vocab_size=8, embed=8, layers=2, heads=2, kv_heads=2, head_dim=4, ffw=8, max_length=16)


def scores(config, params, tokens) -> np.ndarray:
    positions = jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape)

    @jax.jit
    def run(params, tokens):
        h, _ = decoder.hidden(params, config, tokens, positions, dense(positions), ())
        return decoder.logits(params, config, h)

    return np.asarray(run(params, jnp.asarray(tokens)))


def shaken(config: ModelConfig, seed: int = 0) -> dict:
    generator = np.random.default_rng(seed)
    return jax.tree.map(lambda leaf: generator.normal(0, 1, leaf.shape).astype(np.float32), decoder.abstract(config))


def assert_same(ours: dict, theirs: dict) -> None:
    assert jax.tree.structure(ours) == jax.tree.structure(theirs)
    assert all(np.array_equal(a, b) for a, b in zip(jax.tree.leaves(ours), jax.tree.leaves(theirs)))


def test_a_real_directory_of_transformers_4(data_dir):
    config, params = hf.load(data_dir / "verl-tiny-llama")
    assert config == ModelConfig(
        vocab_size=16,
        embed=128,
        layers=4,
        heads=4,
        kv_heads=4,
        head_dim=32,
        ffw=344,
        max_length=2048,
        rope_theta=10000.0,
        norm_eps=1e-6,
    )
    tokens = np.random.default_rng(0).integers(0, 16, (1, 20))
    exact = numpy_llama.forward(params, config, tokens[0], dtype=np.float64)
    np.testing.assert_allclose(scores(config, params, tokens)[0], exact, rtol=0, atol=1e-5)
    kept = hf.load(data_dir / "verl-tiny-llama", dtype=None)[1]
    assert {leaf.dtype for leaf in jax.tree.leaves(kept)} == {np.dtype(ml_dtypes.bfloat16)}
    assert_same(params, jax.tree.map(lambda leaf: leaf.astype(np.float32), kept))


@pytest.mark.parametrize(
    "config",
    [
        SQUARE,  # nothing but its name says which way round a square matrix lies
        dataclasses.replace(TINY, rope_scaling=RopeScaling("linear", 2.0), activation="gelu_tanh", norm_eps=3e-6),
        dataclasses.replace(TINY, tied=False, rope_theta=5e5, rope_scaling=RopeScaling("llama3", 8.0, 1.5, 3.0, 99)),
    ],
    ids=["square", "linear", "llama3"],
)
def test_float32_comes_back_to_the_bit(tmp_path, config):
    params = shaken(config)
    hf.save(tmp_path / "out", config, params)
    again, loaded = hf.load(tmp_path / "out")
    assert again == config
    assert_same(loaded, params)


def test_bfloat16_rounds_to_nearest_even_once(tmp_path):
    params = shaken(SQUARE)
    hf.save(tmp_path / "out", SQUARE, jax.tree.map(jnp.asarray, params), dtype="bfloat16")
    loaded = hf.load(tmp_path / "out")[1]
    assert_same(loaded, jax.tree.map(lambda leaf: leaf.astype(ml_dtypes.bfloat16).astype(np.float32), params))
    hf.save(tmp_path / "again", SQUARE, loaded, dtype="bfloat16")
    once, twice = ((tmp_path / name / "model.safetensors").read_bytes() for name in ("out", "again"))
    assert once == twice


def test_matrices_of_the_file_are_outputs_by_inputs(tmp_path):
    params = shaken(TINY)
    hf.save(tmp_path / "out", TINY, params)
    theirs = safetensors.numpy.load_file(tmp_path / "out" / "model.safetensors")
    layer = params["layers"]["1"]
    assert theirs["model.layers.1.self_attn.k_proj.weight"][1 * 8 + 5, 30] == layer["k"][30, 1, 5]
    assert theirs["model.layers.1.self_attn.o_proj.weight"][30, 3 * 8 + 5] == layer["o"][3, 5, 30]
    assert theirs["model.layers.1.mlp.down_proj.weight"][30, 60] == layer["down"][60, 30]
    assert theirs["model.embed_tokens.weight"][60, 30] == params["embed"][60, 30]
    assert "lm_head.weight" not in theirs


def test_a_saved_golden_is_the_golden(tmp_path):
    config, params = hf.load(GOLDEN)
    hf.save(tmp_path / "out", config, params, dtype="float16")
    ours, theirs = (
        safetensors.safe_open(folder / "model.safetensors", "numpy") for folder in (tmp_path / "out", GOLDEN)
    )
    assert sorted(ours.keys()) == sorted(theirs.keys()) and ours.metadata() == theirs.metadata()
    assert all(np.array_equal(ours.get_tensor(name), theirs.get_tensor(name)) for name in ours.keys())


def test_tensors_of_a_layer_have_one_order_in_the_file(tmp_path):
    """Equal weights make equal files. Runs that are compared byte by byte have tensors in the order of our names."""
    hf.save(tmp_path / "out", SQUARE, decoder.init(SQUARE, 0))
    names = list(tensor_file.entries(tmp_path / "out" / "model.safetensors"))
    first = [name.split(".0.")[1].split(".")[-2] for name in names if ".layers.0." in name]
    attention, feed_forward = ["k_proj", "o_proj", "q_proj"], ["down_proj", "post_attention_layernorm", "gate_proj"]
    assert first == ["input_layernorm", *feed_forward, *attention, "up_proj", "v_proj"]


def test_tokenizer_files_and_ids_go_along(tmp_path):
    (tmp_path / "tokenizer.json").write_text("{}")
    hf.save(
        tmp_path / "out",
        SQUARE,
        shaken(SQUARE),
        tokenizer_files=[tmp_path / "tokenizer.json"],
        eos_ids=(3, 5),
        bos_id=1,
    )
    hf.save(tmp_path / "one", SQUARE, shaken(SQUARE), eos_ids=(3,))
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == [
        "config.json",
        "generation_config.json",
        "model.safetensors",
        "tokenizer.json",
    ]
    for name in ("config.json", "generation_config.json"):
        written = json.loads((tmp_path / "out" / name).read_text())
        assert (written["eos_token_id"], written["bos_token_id"]) == ([3, 5], 1)
        written = json.loads((tmp_path / "one" / name).read_text())
        assert (written["eos_token_id"], written["bos_token_id"]) == (3, None)


def test_an_export_is_replaced_whole_or_not_at_all(tmp_path, monkeypatch):
    first, second = shaken(SQUARE, 1), shaken(SQUARE, 2)
    hf.save(tmp_path / "out", SQUARE, first)
    monkeypatch.setattr(hf, "_write_json", lambda file, value: (_ for _ in ()).throw(OSError("disk full")))
    with pytest.raises(OSError, match="disk full"):
        hf.save(tmp_path / "out", SQUARE, second)
    assert_same(hf.load(tmp_path / "out")[1], first)
    assert [path.name for path in tmp_path.iterdir()] == ["out"]
    monkeypatch.undo()
    hf.save(tmp_path / "out", SQUARE, second)
    assert_same(hf.load(tmp_path / "out")[1], second)
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_a_folder_that_is_no_export_is_left_alone(tmp_path):
    (tmp_path / "thesis.txt").write_text("")
    refused("is no export to be replaced", hf.save, tmp_path, SQUARE, shaken(SQUARE))


def test_params_of_another_shape_are_not_saved(tmp_path):
    params = shaken(SQUARE)
    params["layers"]["1"]["o"] = params["layers"]["1"]["o"][:1]
    refused(r"layers.1.o has shape \(1, 4, 8\), expected \(2, 4, 8\)", hf.save, tmp_path / "out", SQUARE, params)
    del params["head"]
    params["layers"]["1"]["o"] = np.zeros((2, 4, 8))
    refused("params have no head, needed for lm_head.weight", hf.save, tmp_path / "out", SQUARE, params)
    assert list(tmp_path.iterdir()) == []


def edited(folder: Path, change) -> Path:
    """The export in `folder` with `change` applied to its config (a dict) or to its tensors."""
    config = json.loads((folder / "config.json").read_text())
    tensors = safetensors.numpy.load_file(folder / "model.safetensors")
    change(config, tensors)
    (folder / "config.json").write_text(json.dumps(config))
    safetensors.numpy.save_file(tensors, folder / "model.safetensors")
    return folder


NORM = "model.layers.1.input_layernorm.weight"


@pytest.mark.parametrize(
    "change, sentence",
    [
        (lambda c, t: c.update(architectures=["MambaForCausalLM"]), "MambaForCausalLM is not read; known are Llama"),
        (lambda c, t: c.update(architectures=["Gemma3nForConditionalGeneration"]), "Gemma3nForCond.* is not read"),
        (lambda c, t: c.update(architectures=["Gemma3ForConditionalGeneration"]), "needs text_config"),
        (lambda c, t: c.pop("hidden_size"), "hidden_size must be a whole number of at least 1, got None"),
        (lambda c, t: c.update(vocab_size="8"), "vocab_size must be a whole number of at least 1, got '8'"),
        (
            lambda c, t: c.update(num_attention_heads=0),
            "num_attention_heads must be a whole number of at least 1, got 0",
        ),
        (lambda c, t: c.update(rms_norm_eps=None), "rms_norm_eps must be a number, got None"),
        (lambda c, t: c.update(layer_types=["sliding_attention"] * 2), "layer_types=.* is not supported"),
        (lambda c, t: c.update(rope_parameters={"full_attention": {}}), "by kind of layer are not supported"),
        (lambda c, t: c.update(rope_scaling={"partial_rotary_factor": 0.5}), "partial_rotary_factor must be 1.0"),
        (
            lambda c, t: c.update(attention_bias=True),
            "attention_bias=True is not supported for .*; it must be absent or false",
        ),
        (lambda c, t: c.update(quantization_config={"bits": 4}), "quantised by method 'of no name' are not read"),
        (
            lambda c, t: c.update(
                architectures=["DeepseekV3ForCausalLM"], model_type="deepseek_v3", scoring_func="sigmoid", n_group=8
            ),
            "DeepseekV3ForCausalLM is not read: its router .* sigmoid .*; the nearest that is read is Qwen3MoeForCausalLM$",
        ),
        (
            lambda c, t: c.update(architectures=["Glm4MoeForCausalLM"], model_type="glm4_moe", n_group=1, topk_group=1),
            "Glm4MoeForCausalLM is not read: its router .* groups, .*; the nearest that is read is Qwen3MoeForCausalLM$",
        ),
        (lambda c, t: c.update(hidden_act="relu"), "hidden_act='relu' is not one of silu"),
        (
            lambda c, t: c.update(rope_scaling={"type": "ntk", "factor": 2}),
            "rope type 'ntk' is not one of default, linear, llama3, yarn, dynamic, longrope",
        ),
        (lambda c, t: c.update(rope_scaling={"type": "yarn"}), "factor must be a number, got None"),
        (lambda c, t: c.update(rope_scaling={"type": "linear"}), "factor must be a number"),
        (lambda c, t: t.pop(NORM), rf"tensor {NORM} is missing; expected shape \(8,\)"),
        (lambda c, t: t.update(extra=np.zeros((2, 3))), r"tensor extra of shape \(2, 3\) is not part"),
        (lambda c, t: t.update({NORM: np.ones(9, np.float32)}), rf"tensor {NORM} has shape \(9,\), expected \(8,\)"),
        (lambda c, t: t.update({NORM: np.ones(8, np.int8)}), rf"tensor {NORM} has type I8, expected one of BF16"),
        (lambda c, t: c.update(tie_word_embeddings=True), "lm_head.weight differs from"),
    ],
)
def test_wrong_directories_are_refused_in_one_sentence(tmp_path, change, sentence):
    hf.save(tmp_path / "out", SQUARE, shaken(SQUARE))
    refused(sentence, hf.load, edited(tmp_path / "out", change))


@pytest.mark.parametrize(
    "family, longer, tower",
    [
        ("gemma3", "language_model.model.", "vision_tower.vision_model.embeddings.patch_embedding.weight"),
        ("gemma4", "model.language_model.", "model.vision_tower.patch_embedder.input_proj.weight"),
        ("qwen3_5", "model.language_model.", "model.visual.patch_embed.proj.weight"),
        ("qwen3_5_moe", "model.language_model.", "model.visual.patch_embed.proj.weight"),
    ],
)
def test_of_a_model_with_a_vision_tower_the_text_model_is_trained_and_the_rest_is_saved_as_it_is(
    tmp_path, family, longer, tower
):
    """Both spellings that transformers writes. A tensor of no known part is refused. Layers that propose tokens are a part too."""
    wide, narrow = np.arange(6, dtype=np.float32).reshape(2, 3), np.arange(4).astype(ml_dtypes.bfloat16)
    name = {"qwen3_5_moe": "Qwen3_5Moe"}.get(family, family.capitalize())
    whole = f"{name}ForConditionalGeneration"

    def wrapped(config, tensors):
        inner = {key: value for key, value in config.items() if key != "architectures"}
        tied = inner.pop("tie_word_embeddings", True)
        config.clear()
        config.update(architectures=[whole], model_type=family, text_config=inner, tie_word_embeddings=tied)
        for name in [name for name in tensors if name.startswith("model.")]:
            tensors[longer + name.removeprefix("model.")] = tensors.pop(name)
        tensors[tower], tensors["mtp.fc.weight"], tensors["mtp.at"] = wide, narrow, np.arange(3)

    shutil.copytree(GOLDENS / family, tmp_path / "out")
    config, params = hf.load(edited(tmp_path / "out", wrapped))
    plain, expected = hf.load(GOLDENS / family)
    assert config == plain
    assert_same(params, expected)
    assert hf.remarks(GOLDENS / family) == [] == hf.remarks(GOLDENS / family / "scores.npz")
    assert [line.rpartition(": ")[2] for line in hf.remarks(tmp_path / "out")] == [
        f"the text model of {whole} is trained, as {name}ForCausalLM; its other parts are saved as they are"
    ]
    (tmp_path / "out" / "preprocessor_config.json").write_text('{"size": 3}')
    trained, others = jax.tree.map(lambda leaf: leaf + 1, params), hf.other_parts(tmp_path / "out")
    hf.save(tmp_path / "again", config, trained, dtype="float32", others=others, max_file_bytes=20_000)
    again, read = hf.load(tmp_path / "again")
    assert again == config and (tmp_path / "again" / "preprocessor_config.json").read_text() == '{"size": 3}'
    assert_same(read, trained)
    theirs, ours = (
        {name: one for file in folder.glob("*.safetensors") for name, one in safetensors.numpy.load_file(file).items()}
        for folder in (tmp_path / "out", tmp_path / "again")
    )
    assert theirs.keys() == ours.keys()
    for name in (tower, "mtp.fc.weight", "mtp.at"):
        assert ours[name].dtype == theirs[name].dtype and ours[name].tobytes() == theirs[name].tobytes()
    about, before = (json.loads((tmp_path / one / "config.json").read_text()) for one in ("again", "out"))
    assert about == before | {"text_config": before["text_config"] | {"dtype": "float32"}}
    other = edited(tmp_path / "out", lambda c, t: t.update({"model.head.weight": np.zeros(2, np.float32)}))
    refused("tensor model.head.weight of shape .* is not part of this architecture", hf.load, other)


def test_both_spellings_of_config_give_the_same(tmp_path):
    hf.save(tmp_path / "out", SQUARE, shaken(SQUARE))

    def newer(config, tensors):
        config["dtype"] = config.pop("torch_dtype")
        config["rope_parameters"] = {"rope_type": "linear", "rope_theta": 777.0, "factor": 2.0}
        del config["rope_theta"], config["rope_scaling"]

    assert hf.load(edited(tmp_path / "out", newer))[0] == dataclasses.replace(
        SQUARE, rope_theta=777.0, rope_scaling=RopeScaling("linear", 2.0)
    )

    def older(config, tensors):
        config.update(rope_theta=777.0, rope_scaling={"type": "linear", "factor": 2.0})
        del config["rope_parameters"], config["head_dim"], config["num_key_value_heads"]
        tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = np.zeros(2, np.float32)

    assert hf.load(edited(tmp_path / "out", older))[0] == dataclasses.replace(
        SQUARE, rope_theta=777.0, rope_scaling=RopeScaling("linear", 2.0)
    )


def test_a_second_copy_of_a_tied_embedding_is_accepted(tmp_path):
    config = dataclasses.replace(SQUARE, tied=True)
    hf.save(tmp_path / "out", config, shaken(config))
    edited(tmp_path / "out", lambda c, t: t.update({"lm_head.weight": t["model.embed_tokens.weight"].copy()}))
    assert_same(hf.load(tmp_path / "out")[1], shaken(config))


@pytest.mark.parametrize(
    "remove, add, sentence",
    [
        ("model.safetensors", "pytorch_model.bin", r"bin is a pickle, .*convert it .*out', dtype='auto'\)\.save"),
        ("model.safetensors", "consolidated.00.pth", "consolidated.00.pth is a pickle"),
        ("model.safetensors", "model.safetensors.index.json", "weight_map must be an object of file names"),
        ("model.safetensors", None, "no model.safetensors in it, and no model.safetensors.index.json"),
        ("config.json", None, "config.json: no such file"),
    ],
)
def test_missing_files_are_named(tmp_path, remove, add, sentence):
    shutil.copytree(GOLDEN, tmp_path / "out")
    (tmp_path / "out" / remove).unlink()
    if add:
        (tmp_path / "out" / add).write_text("{}")
    refused(sentence, hf.load, tmp_path / "out")


def test_broken_files_are_refused_in_one_sentence(tmp_path):
    shutil.copytree(GOLDEN, tmp_path / "out")
    weights = tmp_path / "out" / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-7])
    refused("not a whole safetensors file", hf.load, tmp_path / "out")
    (tmp_path / "out" / "config.json").write_text("{")
    refused("config.json: no JSON", hf.load, tmp_path / "out")
    refused("no such directory", hf.load, tmp_path / "nowhere")


def test_each_leaf_goes_to_its_sharding_as_it_is_read():
    devices = mesh.make_mesh(1, 2, 2)
    folder = GOLDENS / "qwen3"
    config, host = hf.load(folder)
    shardings = mesh.param_shardings(devices, decoder.axes(config), "learner")
    again, placed = hf.load(folder, shardings=shardings)
    assert again == config
    assert_same(placed, host)
    assert all(leaf.sharding == home for leaf, home in zip(jax.tree.leaves(placed), jax.tree.leaves(shardings)))
    assert placed["layers"]["0"]["gate"].addressable_shards[0].data.shape == (16, 24)
    half = hf.load(folder, dtype=None, shardings=mesh.replicated(devices))[1]
    assert {leaf.dtype for leaf in jax.tree.leaves(half)} == {np.dtype(ml_dtypes.bfloat16)}
    assert_same(jax.tree.map(lambda leaf: np.asarray(leaf, np.float32), half), host)


@pytest.mark.parametrize("family", ["qwen3", "gemma2", "qwen2", "qwen2_moe", "mixtral", "qwen3_5", "qwen3_next"])
@pytest.mark.parametrize("sizes", [(2, 2, 1), (1, 2, 2), (1, 1, 2)])
def test_each_byte_is_read_once_and_each_piece_is_that_of_the_whole(family, sizes, monkeypatch):
    """However many devices hold a piece. The mesh splits both sides of a matrix."""
    config, host = hf.load(GOLDENS / family)
    shardings = mesh.param_shardings(mesh.make_mesh(*sizes), decoder.axes(config), "learner")
    fill, sizes_read = tensor_file._fill, []
    monkeypatch.setattr(tensor_file, "_fill", lambda *given: (sizes_read.append(given[1].size), fill(*given)))
    _, placed = hf.load(GOLDENS / family, shardings=shardings)
    assert_same(placed, host)
    (stored,) = {entry.type for entry in hf._entries(GOLDENS / family).values()}
    per_number = tensor_file.FLOATS[stored].itemsize
    assert sum(sizes_read) == per_number * sum(leaf.size for leaf in jax.tree.leaves(host))


def test_a_square_matrix_is_cut_the_right_way_round(tmp_path):
    """Its shape is the same in the file, where inputs and outputs have changed places."""
    hf.save(tmp_path / "out", SQUARE, shaken(SQUARE))
    split = mesh.param_shardings(mesh.make_mesh(1, 2, 1), decoder.axes(SQUARE), "learner")
    assert_same(hf.load(tmp_path / "out", shardings=split)[1], shaken(SQUARE))


def test_an_export_has_the_dtype_of_the_model_that_was_read(tmp_path):
    for dtype, kept in (("bfloat16", "bfloat16"), ("float32", "float32"), ("float16", "float32")):
        hf.save(tmp_path / dtype, SQUARE, shaken(SQUARE), dtype=dtype)
        assert hf.stored_dtype(tmp_path / dtype) == kept
    assert hf.stored_dtype(tmp_path) == "float32"  # no weights yet, in a plan


def test_an_export_gathers_one_leaf_at_a_time_and_keeps_none(tmp_path, monkeypatch):
    """Sharded arrays, several files: as from host arrays, byte for byte."""
    params = shaken(SQUARE)
    shardings = mesh.param_shardings(mesh.make_mesh(1, 2, 2), decoder.axes(SQUARE), "learner")
    placed = mesh.put(params, shardings)
    alive, gather = [], processes.gathered

    def watched(leaf, dtype):
        gc.collect()
        alive.append(sum(one() is not None for one in made))
        made.append(weakref.ref(value := gather(leaf, dtype)))
        return value

    made: list = []
    monkeypatch.setattr(processes, "gathered", watched)
    hf.save(tmp_path / "placed", SQUARE, placed, dtype="bfloat16", max_file_bytes=400)
    monkeypatch.undo()
    assert len(made) == len(jax.tree.leaves(params)) and max(alive) <= 1
    hf.save(tmp_path / "host", SQUARE, params, dtype="bfloat16", max_file_bytes=400)
    files = sorted(path.name for path in (tmp_path / "host").iterdir())
    assert files == sorted(path.name for path in (tmp_path / "placed").iterdir()) and len(files) > 4
    for name in files:
        assert (tmp_path / "host" / name).read_bytes() == (tmp_path / "placed" / name).read_bytes()
    assert all(leaf._npy_value is None for leaf in jax.tree.leaves(placed))


@pytest.mark.parametrize(
    "change, sentence",
    [
        (lambda index: index["weight_map"].update({"model.norm.weight": "elsewhere.x"}), "names 'elsewhere.x"),
        (lambda index: index["weight_map"].update({"model.norm.weight": "../qwen3/config.json"}), "is no file of this"),
        (lambda index: index["weight_map"].pop("model.norm.weight"), "norm.weight is in model-.*index says otherwise"),
        (
            lambda index: index["weight_map"].update(extra="model-00001-of-00003.safetensors"),
            "extra is not in model-00001",
        ),
    ],
)
def test_an_index_that_does_not_fit_its_files_is_refused(tmp_path, change, sentence):
    shutil.copytree(GOLDENS / "qwen3", tmp_path / "out")
    file = tmp_path / "out" / "model.safetensors.index.json"
    index = json.loads(file.read_text())
    change(index)
    file.write_text(json.dumps(index))
    refused(sentence, hf.load, tmp_path / "out")


def test_float16_is_exact_where_it_can_be(tmp_path):
    kept = hf.load(GOLDEN, dtype=None)[1]
    assert {leaf.dtype for leaf in jax.tree.leaves(kept)} == {np.dtype(np.float16)}
    assert_same(hf.load(GOLDEN)[1], jax.tree.map(lambda leaf: leaf.astype(np.float32), kept))


def test_weights_that_are_not_finite_are_refused_at_load_with_the_tensors_name(tmp_path):
    params = shaken(SQUARE)
    params["layers"]["1"]["up"][2, 3] = np.nan
    hf.save(tmp_path / "out", SQUARE, params)
    refused(r"tensor model.layers.1.mlp.up_proj.weight holds 1 of 64 .* nan at \[3, 2\]", hf.load, tmp_path / "out")
    split = mesh.param_shardings(mesh.make_mesh(1, 2, 2), decoder.axes(SQUARE), "learner")
    with pytest.raises(ValueError, match=r"tensor model.layers.1.mlp.up_proj.weight holds 1 of 64 .* nan at \[3, 2\]"):
        hf.load(tmp_path / "out", shardings=split)
    params["layers"]["1"]["up"][2, 3] = 1e30
    hf.save(tmp_path / "out", SQUARE, params)
    with pytest.raises(ValueError, match="up_proj.weight holds 1 of 64 numbers that are not finite as float16; .* inf"):
        hf.load(tmp_path / "out", dtype=np.float16)
    with pytest.raises(ValueError, match="up_proj.weight holds 1 of 64 numbers that are not finite as float16; .* inf"):
        hf.load(tmp_path / "out", dtype=np.float16, shardings=split)


@pytest.mark.parametrize("which", [1, 2])
def test_a_rename_that_fails_leaves_the_earlier_export_in_its_place(monkeypatch, tmp_path, which):
    for name in ("policy", "made"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "model").write_text(name)
    calls, real = [], os.rename

    def rename(one, other):
        calls.append(one)
        if len(calls) == which:
            raise OSError(errno.EIO, "Input/output error")
        real(one, other)

    monkeypatch.setattr(os, "rename", rename)
    with pytest.raises(OSError, match="Input/output error"):
        hf.swap_in(tmp_path / "made", tmp_path / "policy")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["made", "policy"]
    assert (tmp_path / "policy" / "model").read_text() == "policy"


@pytest.mark.parametrize("renamed", [False, True])
def test_what_a_killed_export_left_beside_it_is_gone_after_the_next(tmp_path, renamed):
    """Killed between two renames, the earlier export has no name. It gets it back, also where the next export fails."""
    config = PRESETS["tiny"]
    hf.save(tmp_path / "policy", config, decoder.init(config, 0))
    first = (tmp_path / "policy" / "model.safetensors").read_bytes()
    (tmp_path / ".policy.part").mkdir()
    (tmp_path / ".policy.part" / "model.safetensors").write_bytes(b"half")
    (tmp_path / ".policy.old").mkdir()
    if renamed:
        (tmp_path / "policy").rename(tmp_path / ".policy.old" / "policy")
    with pytest.raises(OSError, match="full"), hf.replacing(tmp_path / "policy"):
        raise OSError("full")
    assert (tmp_path / "policy" / "model.safetensors").read_bytes() == first
    assert [path.name for path in tmp_path.iterdir()] == ["policy"]
