"""What is refused of a teacher and of a reward model, in one sentence each, and that the other kind of model is refused."""

from __future__ import annotations

import dataclasses
import shutil
from pathlib import Path

import numpy as np
import pytest

from jaxrl_post.config import default, resolve
from jaxrl_post.data import tokenizer
from jaxrl_post.launch.parts import inputs, second_models
from jaxrl_post.models import decoder, hf

DEMO = Path(__file__).resolve().parents[1] / "configs" / "demo_policy"
WORDS = tokenizer.load(DEMO)
SMALL = decoder.ModelConfig(
    vocab_size=WORDS.vocab_size, embed=32, layers=1, heads=4, kv_heads=2, head_dim=8, ffw=48, max_length=128, tied=True
)
KINDS = [(second_models.TEACHER, False), (second_models.REWARD_MODEL, True)]


def made(folder, *, scalar, words=DEMO, **changes):
    """Writes a model of this kind with a tokenizer."""
    model = dataclasses.replace(SMALL, scalar=scalar, tied=not scalar, **changes)
    hf.save(folder, model, decoder.init(model, 3), dtype="float32")
    for file in inputs.tokenizer_files(words):
        shutil.copyfile(file, folder / file.name)
    return folder


def opened(folder, kind, longest=64):
    return second_models.opened(kind, str(folder), WORDS, longest)


@pytest.mark.parametrize("kind, scalar", KINDS)
def test_a_model_of_the_kind_is_opened(tmp_path, kind, scalar):
    found = opened(made(tmp_path / "m", scalar=scalar), kind, 128)
    assert found.place == tmp_path / "m" and found.model.scalar is scalar and found.model.max_length == 128


@pytest.mark.parametrize("kind, scalar", KINDS)
def test_what_does_not_fit_is_one_sentence(tmp_path, kind, scalar):
    def refused(folder, words, longest=64):
        with pytest.raises(ValueError, match=words) as error:
            opened(folder, kind, longest)
        assert str(error.value).startswith(f"{kind.option}={folder}") and len(str(error.value)) < 400 + len(str(folder))

    refused(
        tmp_path / "none", f"no such folder with a config.json; {kind.name} is a Hugging Face directory, such as the "
    )
    refused(made(tmp_path / "m", scalar=scalar), "fewer than engine.max_length=129; the nearest .* is 128", 129)
    few = made(tmp_path / "few", scalar=scalar, vocab_size=WORDS.vocab_size - 1)
    refused(
        few,
        f"its model has {WORDS.vocab_size - 1} tokens and the policy's tokenizer {WORDS.vocab_size}; {kind.name} reads",
    )
    text = (tmp_path / "m" / "tokenizer.json").read_text()
    swapped = text.replace('"1"', '"one"').replace('"2"', '"1"').replace('"one"', '"2"')
    (tmp_path / "m" / "tokenizer.json").write_text(swapped)
    refused(tmp_path / "m", rf"token \d+ of its tokenizer is '[12]', of the policy's '[12]'; {kind.name} has")
    other = made(tmp_path / "other", scalar=not scalar)
    refused(
        other, "is a policy: a reward model's" if scalar else "is a reward model, which gives tokens no probability"
    )


def test_weights_of_another_number_format_are_not_looked_at(tmp_path):
    """Only config.json and the tokenizer are read: the weights may be huge."""
    folder = made(tmp_path / "m", scalar=False)
    for file in folder.glob("*.safetensors"):
        file.unlink()
    np.testing.assert_equal(opened(folder, second_models.TEACHER).model, hf.read_config(folder / "config.json"))


def test_what_whole_hosts_cannot_have_is_refused():
    """One sentence for each, with what works instead; a run without any of them is not refused."""
    apart = "does not work where whole hosts learn and whole hosts generate; the nearest valid mesh.engine is 0"
    state = (
        "keeps state that processes without the learner's devices do not have, .*; the nearest valid mesh.engine is 0"
    )
    asked = (
        "by every process, and with mesh.engine=2 some have no device of the engine; the nearest valid mesh.engine is 0"
    )
    given = ("model.preset=tiny", "mesh.engine=2")
    second_models.refuse_whole_hosts(resolve(default(), given))
    for options, sentence in (
        (["lora.rank=4"], f"^lora.rank=4 {apart}$"),
        (["algorithm.adv_estimator=gae"], f"^algorithm.adv_estimator='gae' {state}$"),
        (["algorithm.use_kl_in_reward=true", "algorithm.kl_target=0.5"], f"^algorithm.kl_target=0.5 {state}$"),
        (["teacher.path=a", "algorithm.opd_kl_coef=0.1"], f"^teacher.path=a {apart}$"),
        (["reward.model=a"], f"^reward.model=a is scored {asked}$"),
        (["judge.model=a", "judge.question={answer}"], f"^judge.model=a is asked {asked}$"),
    ):
        with pytest.raises(ValueError, match=sentence):
            second_models.refuse_whole_hosts(resolve(default(), (*given, *options)))
