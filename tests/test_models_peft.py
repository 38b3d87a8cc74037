"""PEFT's files: written and read alike, and refused where they say what is not computed here.

That peft itself loads them is shown by scripts/shows/lora.py, in an environment of its own.
"""

from __future__ import annotations

import json
from pathlib import Path

import jax
import lora_arms
import made_groups
import numpy as np
import parity_arms
import pytest
import safetensors.numpy
from refusals import refused

from jaxrl_post.models import hf, lora, peft, tensor_file
from jaxrl_post.models.model_config import Lora

pytestmark = pytest.mark.usefixtures("quick_compilation")

GIVEN = Lora(4, 8.0, ("q", "o", "down"), True)
MODEL = lora.adapting(made_groups.MODEL, GIVEN)


@pytest.fixture
def written(tmp_path):
    peft.save(tmp_path / "adapter", MODEL, lora_arms.adapter(GIVEN, 0), base="/where/the/base/is")
    return tmp_path / "adapter"


def test_what_was_written_is_read_bit_for_bit(written):
    found = peft.load(written, MODEL)
    pairs = zip(jax.tree.leaves(found), jax.tree.leaves(lora_arms.adapter(GIVEN, 0)), strict=True)
    assert all(np.array_equal(a, b) for a, b in pairs)
    assert peft.read(written) == (GIVEN, "/where/the/base/is")


def test_tensors_have_pefts_names_and_shapes(written):
    """lora_A.weight is [r, inputs], and lora_B.weight @ lora_A.weight is what is added to the file's [outputs, inputs]."""
    entries = tensor_file.entries(written / peft.TENSORS)
    m, a = made_groups.MODEL, lora_arms.adapter(GIVEN, 0)["layers"]["1"]
    stem = "base_model.model.model.layers.1.self_attn.o_proj"
    first, second = (tensor_file.read(entries[f"{stem}.lora_{part}.weight"]) for part in "AB")
    assert first.shape == (4, m.heads * m.head_dim) and second.shape == (m.embed, 4)
    merged = lora_arms.flat(a["o_a"], 2) @ lora_arms.flat(a["o_b"], 1)
    np.testing.assert_allclose(second @ first, merged.T, rtol=1e-5, atol=1e-7)
    told = json.loads((written / peft.CONFIG).read_text())
    assert told["target_modules"] == ["q_proj", "o_proj", "down_proj"] and told["use_rslora"] is True
    assert (told["r"], told["lora_alpha"], told["lora_dropout"], told["bias"]) == (4, 8.0, 0.0, "none")


@pytest.mark.parametrize(
    "change, sentence",
    [
        (dict(use_dora=True), "use_dora=True is not supported"),
        (dict(bias="all"), "bias='all' is not one of none"),
        (dict(rank_pattern={"q_proj": 8}), "rank_pattern=.* is not supported"),
        (dict(modules_to_save=["lm_head"]), "modules_to_save=.* is not supported"),
        (dict(peft_type="IA3"), "peft_type='IA3' is not one of LORA"),
        (dict(r=8), "it has rank=8, and lora.rank means 4; the nearest valid lora.rank is 8"),
        (dict(use_rslora=False), "it has rslora=False"),
        (dict(lora_alpha="big"), "lora_alpha must be a number"),
    ],
)
def test_other_adapters_are_refused(written, change, sentence):
    told = json.loads((written / peft.CONFIG).read_text())
    (written / peft.CONFIG).write_text(json.dumps(told | change))
    refused(sentence, peft.load, written, MODEL)


def test_other_tensors_are_refused(written, tmp_path):
    other = lora.adapting(made_groups.MODEL, GIVEN._replace(targets=("q", "o")))
    refused("it has targets=.*down_proj", peft.load, written, other)
    refused("no adapter_config.json in it", peft.load, tmp_path, MODEL)
    (tmp_path / "other").mkdir()
    with pytest.raises(ValueError, match="it exists and holds no adapter_config.json"):
        peft.save(tmp_path / "other", MODEL, lora_arms.adapter(GIVEN, 0), base="")


@pytest.mark.parametrize(
    "family, modules",
    [
        ("qwen3_5", {"in_proj_qkv", "in_proj_z", "in_proj_a", "in_proj_b", "out_proj"}),
        ("qwen3_next", {"in_proj_qkvz", "in_proj_ba", "out_proj"}),
    ],
)
def test_additions_to_layers_with_a_gated_delta_rule(tmp_path, family, modules):
    """In the files of transformers' modules a merge adds scale B A, and to nothing else. Layers with additions score alike."""
    model, base = hf.load(Path(__file__).parent / "goldens" / family)
    given = Lora(2, 4.0, lora.targets(("all-linear",), model))
    whole, added = lora.adapting(model, given), lora_arms.adapter(given, 0, model=model)
    peft.save(tmp_path / "adapter", whole, added, base="")
    jax.tree.map(np.testing.assert_array_equal, peft.load(tmp_path / "adapter", whole), added)
    told = json.loads((tmp_path / "adapter" / peft.CONFIG).read_text())["target_modules"]
    assert set(told) == modules | {f"{name}_proj" for name in ("q", "k", "v", "o", "gate", "up", "down")}

    policy = lora.Adapted(base, added, given)
    merged = jax.tree.map(np.asarray, lora.merge(jax.tree.map(jax.numpy.array, policy)))
    hf.save(tmp_path / "merged", model, lora.exported(policy))
    files = (tmp_path / "merged", Path(__file__).parent / "goldens" / family, tmp_path / "adapter")
    after, before, pairs = (safetensors.numpy.load_file(next(folder.glob("*.safetensors"))) for folder in files)
    for name, weight in after.items():
        a, b = (pairs.pop(f"base_model.model.{name.removesuffix('.weight')}.lora_{part}.weight", None) for part in "AB")
        expected = 0 if a is None else given.scale * (b @ a)
        np.testing.assert_allclose(
            weight - before[name].astype(np.float32), expected, rtol=1e-4, atol=1e-6, err_msg=name
        )
    assert not pairs

    tokens = jax.numpy.asarray(parity_arms.golden(family)[0][:1, :7])
    scores = [
        jax.jit(parity_arms.packed_arm, static_argnums=0)(config, params, tokens)
        for config, params in ((whole, lora.whole(policy)), (model, merged))
    ]
    np.testing.assert_allclose(*scores, rtol=1e-4, atol=1e-4)
