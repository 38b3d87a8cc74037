"""Where a teacher comes from, what is refused in one sentence, what it takes, and whose run it is."""

import dataclasses
import json
import shutil
from pathlib import Path

import jax
import numpy as np
import pytest

from jaxrl_post.config import default, resolve
from jaxrl_post.data import tokenizer
from jaxrl_post.launch.parts import build, inputs, second_models
from jaxrl_post.launch.plan import memory_plan
from jaxrl_post.models import decoder, hf
from jaxrl_post.models.presets import PRESETS
from jaxrl_post.parallel import mesh as meshes
from jaxrl_post.runs.checkpoint import identity
from jaxrl_post.trainer.state import is_abstract

DEMO = Path(__file__).resolve().parents[1] / "configs" / "demo_policy"
WORDS = tokenizer.load(DEMO)
SMALL = decoder.ModelConfig(
    vocab_size=WORDS.vocab_size + 8,
    embed=32,
    layers=1,
    heads=4,
    kv_heads=2,
    head_dim=8,
    ffw=48,
    max_length=128,
    tied=True,
)


def config(path, *overrides):
    return resolve(
        default(),
        [
            "model.preset=demo",
            f"model.tokenizer={DEMO}",
            *("algorithm.adv_estimator=distill", f"teacher.path={path}"),
            *("engine.max_length=64", "sampling.max_tokens=32", "eval.prompts=0", "data.size=8"),
            *overrides,
        ],
    )


@pytest.fixture
def folder(tmp_path):
    """A teacher of another shape, with more rows than the tokenizer has tokens."""
    hf.save(tmp_path / "teacher", SMALL, decoder.init(SMALL, 3), dtype="float32")
    for file in inputs.tokenizer_files(DEMO):
        shutil.copyfile(file, tmp_path / "teacher" / file.name)
    return tmp_path / "teacher"


def test_a_run_gets_the_folders_weights_and_a_plan_its_shapes(folder):
    given = config(folder)
    start = inputs.gather(given)
    devices = build.device_plan(given)
    made = build.teacher(given, start.model, start.load_params, devices)
    np.testing.assert_array_equal(made._weights["embed"], decoder.init(SMALL, 3)["embed"])
    assert made._model.used_vocab == WORDS.vocab_size
    assert is_abstract(build.teacher(given, start.model, decoder.abstract(start.model), devices)._weights)


def test_the_plan_counts_it(folder):
    given = config(folder, "teacher.dtype=bfloat16")
    held = memory_plan.table(memory_plan.memory(given, PRESETS["demo"]))
    weights = sum(leaf.size for leaf in jax.tree.leaves(decoder.init(SMALL, 3)))
    assert held["weights (teacher, bfloat16)"] == 2 * weights
    plain = resolve(default(), ["model.preset=demo"])
    assert "weights (teacher, float32)" not in memory_plan.table(memory_plan.memory(plain, PRESETS["demo"]))


def test_a_folder_of_no_use_is_refused(folder, tmp_path):
    with pytest.raises(ValueError, match="nowhere: no such folder with a config.json; a teacher is a Hugging Face"):
        second_models.check_teacher(config(tmp_path / "nowhere"), WORDS)
    with pytest.raises(ValueError, match=r"it has 128 positions, fewer than engine.max_length=200; .* is 128"):
        second_models.check_teacher(config(folder, "engine.max_length=200"), WORDS)
    words = json.loads((folder / "tokenizer.json").read_text())
    told = words["model"]["vocab"]
    told["1"], told["2"] = told["2"], told["1"]
    (folder / "tokenizer.json").write_text(json.dumps(words))
    with pytest.raises(
        ValueError, match=r"token \d+ of its tokenizer is '[12]', of the policy's '[12]'; a teacher has"
    ):
        second_models.check_teacher(config(folder), WORDS)
    few = dataclasses.replace(SMALL, vocab_size=8)
    hf.save(tmp_path / "few", few, decoder.init(few, 3), dtype="float32")
    with pytest.raises(ValueError, match="its model has 8 tokens and the policy's tokenizer"):
        second_models.check_teacher(config(tmp_path / "few"), WORDS)


def test_a_run_belongs_to_its_teacher(folder):
    """Other weights of the same size are another teacher, and a resumed run is refused with them."""
    before = identity.weights(folder)
    assert before == identity.weights(folder)
    hf.save(folder, SMALL, decoder.init(SMALL, 4), dtype="float32")
    after = identity.weights(folder)
    assert after != before
    with pytest.raises(ValueError, match="resume refused: teacher"):
        identity.check_same({"teacher": before}, {"teacher": after}, 3)


def test_a_mesh_must_divide_it(folder):
    odd = dataclasses.replace(SMALL, heads=3, kv_heads=3)
    hf.save(folder, odd, decoder.init(odd, 3), dtype="float32")
    with pytest.raises(ValueError, match="tensor"):
        memory_plan.memory(config(folder, "mesh.tensor=2"), PRESETS["demo"])
    with pytest.raises(ValueError, match="tensor"):
        second_models.teacher(
            config(folder), PRESETS["demo"], meshes.make_mesh(1, 1, 2), lambda model: None, plans=True
        )
