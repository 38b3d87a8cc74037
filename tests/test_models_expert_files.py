"""Experts in the files: stacks and single matrices give the same leaves, and one expert at a time is in memory."""

from __future__ import annotations

import dataclasses
import shutil
from pathlib import Path

import jax
import numpy as np
import pytest
import safetensors.numpy
from parity_arms import BY_EXPERT, GOLDENS
from refusals import refused
from test_models_families import FAMILIES
from test_models_hf import TINY, assert_same, shaken

from jaxrl_post.models import decoder, hf, peft, tensor_file
from jaxrl_post.models.model_config import Experts, Lora
from jaxrl_post.parallel import mesh, processes

SQUARE = dataclasses.replace(TINY, qk_norm=True, experts=Experts(4, 2, TINY.embed, dense_layers=(0,)))
# Stacks of the file are those of the leaves, transposed, and gate and up are one (Gemma 4).
STACKS = dataclasses.replace(
    next(one for one in FAMILIES if one.experts and one.experts.beside), experts=Experts(4, 2, TINY.embed, beside=True)
)
FIRST = "model.layers.1.mlp.experts.0.gate_proj.weight"
ROUTER = "model.layers.1.mlp.gate.weight"
STACK = "model.layers.1.mlp.experts.gate_up_proj"


def tensors_of(folder: Path) -> dict[str, np.ndarray]:
    return {
        name: one for file in folder.glob("*.safetensors") for name, one in safetensors.numpy.load_file(file).items()
    }


def stacked(source: Path, folder: Path) -> Path:
    """The same model as transformers 5 saves it where it was stacked in memory, in one file."""
    tensors, groups = tensors_of(source), {}
    for name in [name for name in tensors if ".experts." in name]:
        stem, _, rest = name.replace("block_sparse_moe", "mlp").partition(".experts.")
        expert, matrix, _ = rest.split(".")
        part = {"gate_proj": 0, "w1": 0, "up_proj": 1, "w3": 1, "down_proj": 2, "w2": 2}[matrix]
        groups.setdefault(stem, {})[int(expert), part] = tensors.pop(name)
    for stem, own in groups.items():
        count = len(own) // 3
        both = [np.concatenate([own[expert, 0], own[expert, 1]]) for expert in range(count)]
        tensors[f"{stem}.experts.gate_up_proj"] = np.stack(both)
        tensors[f"{stem}.experts.down_proj"] = np.stack([own[expert, 2] for expert in range(count)])
    folder.mkdir()
    shutil.copyfile(source / "config.json", folder / "config.json")
    renamed = {name.replace("block_sparse_moe", "mlp"): tensor for name, tensor in tensors.items()}
    safetensors.numpy.save_file(renamed, folder / "model.safetensors")
    return folder


@pytest.mark.parametrize("family", BY_EXPERT)
def test_stacks_and_single_matrices_are_the_same_model(tmp_path, family):
    config, params = hf.load(GOLDENS / family)
    folder = stacked(GOLDENS / family, tmp_path / "stacked")
    assert_same(hf.load(folder)[1], params)
    split = mesh.param_shardings(mesh.make_mesh(1, 2, 2), decoder.axes(config), "learner")
    assert_same(hf.load(folder, shardings=split)[1], params)
    hf.save(tmp_path / "out", config, params)
    assert tensors_of(tmp_path / "out").keys() == tensors_of(GOLDENS / family).keys()


@pytest.mark.parametrize("family", BY_EXPERT)
def test_each_matrix_lies_where_the_hub_has_it(family):
    """Outputs by inputs in the file, inputs by outputs in the leaf, gate and up each under its own name."""
    config, params = hf.load(GOLDENS / family)
    layer = params["layers"][str(config.layers - 1)]
    stem, gate, up, down = "mlp", "gate_proj", "up_proj", "down_proj"
    if family == "mixtral":
        stem, gate, up, down = "block_sparse_moe", "w1", "w3", "w2"
    theirs = tensors_of(GOLDENS / family)
    for expert in range(config.experts.count):
        for name, matrix in (("gate", gate), ("up", up), ("down", down)):
            tensor = theirs[f"model.layers.{config.layers - 1}.{stem}.experts.{expert}.{matrix}.weight"]
            assert np.array_equal(layer[f"experts_{name}"][expert], tensor.T.astype(np.float32))


def edited(tmp_path: Path, change) -> Path:
    """A directory with stacks, or without where `change` wants none, whose tensors `change` has changed."""
    params = shaken(SQUARE)
    hf.save(tmp_path / "hub", SQUARE, params)
    folder = stacked(tmp_path / "hub", tmp_path / "stacked") if change.__code__.co_argcount == 2 else tmp_path / "hub"
    tensors, single = tensors_of(folder), tensors_of(tmp_path / "hub")
    change(*(tensors, single)[: change.__code__.co_argcount])
    safetensors.numpy.save_file(tensors, folder / "model.safetensors")
    return folder


@pytest.mark.parametrize(
    "change, sentence",
    [
        (lambda hub: hub.pop(FIRST), rf"tensor {FIRST} is missing; expected shape \(32, 32\)"),
        (
            lambda hub: hub.update({FIRST.replace(".0.", ".4."): hub[FIRST].copy()}),
            r"tensor model.layers.1.mlp.experts.4.gate_proj.weight of shape \(32, 32\) is not part of this architecture",
        ),
        (
            lambda hub: hub.update({FIRST: hub[FIRST][:31].copy()}),
            rf"tensor {FIRST} has shape \(31, 32\), expected \(32, 32\)",
        ),
        (
            lambda hub: hub.update({ROUTER: hub[ROUTER][:3].copy()}),
            rf"tensor {ROUTER} has shape \(3, 32\), expected \(4, 32\)",
        ),
        (
            lambda hub: hub.update({"model.layers.0.mlp.gate.weight": np.zeros((4, 32), np.float32)}),
            r"tensor model.layers.0.mlp.gate.weight of shape \(4, 32\) is not part of this architecture",
        ),
        (lambda hub: hub[FIRST].__setitem__((3, 2), np.nan), rf"tensor {FIRST} holds 1 of 1024 numbers .* nan at \[3, 2\]"),
        (
            lambda stacks, single: stacks.update({STACK: stacks[STACK][:3].copy()}),
            rf"tensor {STACK} has shape \(3, 64, 32\), expected \(4, 64, 32\)",
        ),
        (
            lambda stacks, single: stacks.update({STACK: stacks[STACK].astype(np.int8)}),
            rf"tensor {STACK} has type I8, expected one of BF16",
        ),
        (lambda stacks, single: stacks.pop(STACK), rf"tensor {FIRST} is missing; expected shape \(32, 32\)"),
        (
            lambda stacks, single: stacks.update({FIRST: single[FIRST]}),
            rf"tensor {FIRST.replace('gate_proj', 'up_proj')} is missing; expected shape",
        ),
        (
            lambda stacks, single: stacks.update({name: one for name, one in single.items() if ".experts." in name}),
            r"tensor model.layers.1.mlp.experts.down_proj of shape \(4, 32, 32\) is not part of this architecture",
        ),
    ],
)  # fmt: skip
def test_what_does_not_fit_is_refused_by_name_and_shape(tmp_path, change, sentence):
    refused(sentence, hf.load, edited(tmp_path, change))


@pytest.mark.parametrize("config, expert", [(SQUARE, 1), (STACKS, 1), (STACKS, 2)])
def test_a_square_expert_is_cut_the_right_way_round_and_each_byte_read_once(tmp_path, monkeypatch, config, expert):
    params = shaken(config)
    hf.save(tmp_path / "out", config, params)
    split = mesh.param_shardings(mesh.make_mesh(1, 2, 2, expert=expert), decoder.axes(config), "learner")
    fill, sizes = tensor_file._fill, []
    monkeypatch.setattr(tensor_file, "_fill", lambda *given: (sizes.append(given[1].size), fill(*given)))
    assert_same(hf.load(tmp_path / "out", shardings=split)[1], params)
    assert sum(sizes) == sum(leaf.nbytes for leaf in jax.tree.leaves(params))


def test_an_export_gathers_one_matrix_of_one_expert_at_a_time(tmp_path, monkeypatch):
    params = shaken(SQUARE)
    placed = mesh.put(params, mesh.param_shardings(mesh.make_mesh(1, 2, 2), decoder.axes(SQUARE), "learner"))
    seen, gather = [], processes.gathered
    monkeypatch.setattr(processes, "gathered", lambda *given: (seen.append(given[0].shape), gather(*given))[1])
    hf.save(tmp_path / "placed", SQUARE, placed, dtype="bfloat16", max_file_bytes=20_000)
    assert max(map(len, seen)) == 3 and seen.count((32, 32)) == 12
    monkeypatch.undo()
    hf.save(tmp_path / "host", SQUARE, params, dtype="bfloat16", max_file_bytes=20_000)
    files = sorted(path.name for path in (tmp_path / "host").iterdir())
    assert len(files) > 4 and files == sorted(path.name for path in (tmp_path / "placed").iterdir())
    assert all((tmp_path / "host" / name).read_bytes() == (tmp_path / "placed" / name).read_bytes() for name in files)


def test_a_stack_of_the_file_holds_all_of_gate_before_all_of_up(tmp_path):
    params = shaken(STACKS)
    hf.save(tmp_path / "out", STACKS, params)
    layer, theirs = params["layers"]["1"], tensors_of(tmp_path / "out")
    both = theirs["model.layers.1.experts.gate_up_proj"]
    for expert in range(4):
        assert np.array_equal(both[expert, :32], layer["experts_gate"][expert].T)
        assert np.array_equal(both[expert, 32:], layer["experts_up"][expert].T)
    wrong = theirs | {"model.layers.1.experts.gate_up_proj": both[:, :63].copy()}
    safetensors.numpy.save_file(wrong, tmp_path / "out" / "model.safetensors")
    sentence = r"tensor model.layers.1.experts.gate_up_proj has shape \(4, 63, 32\), expected \(4, 64, 32\)"
    refused(sentence, hf.load, tmp_path / "out")


def test_additions_to_stacks_have_no_form_in_files():
    adapted = dataclasses.replace(STACKS, lora=Lora(2, 4.0, ("q", "gate")))
    sentence = "gate of the experts is part of the tensor model.layers.0.experts.gate_up_proj, .* nearest valid choice is q_proj"
    refused(sentence, peft.tensors, adapted)
    assert len(peft.tensors(dataclasses.replace(adapted, lora=Lora(2, 4.0, ("q",))))) == 2 * 2


def test_a_stack_of_another_count_is_not_saved(tmp_path):
    params = shaken(SQUARE)
    params["layers"]["1"]["experts_up"] = params["layers"]["1"]["experts_up"][:3]
    refused(
        r"layers.1.experts_up has shape \(3, 32, 32\), expected \(4, 32, 32\)",
        hf.save,
        tmp_path / "out",
        SQUARE,
        params,
    )
    del params["layers"]["1"]["experts_up"]
    refused(
        r"params have no layers.1.experts_up, needed for model.layers.1.mlp.experts.0.up_proj.weight \(32, 32\)",
        hf.save, tmp_path / "out", SQUARE, params,
    )  # fmt: skip
