"""What a run starts from: a model that could not be saved is refused at once; weights go where they stay."""

from __future__ import annotations

import dataclasses
import datetime
import json

import gradient_arms as arms
import jax
import numpy as np
import pytest

from jaxrl_post import config as configs
from jaxrl_post.data.tokenizer import characters
from jaxrl_post.launch.parts import inputs
from jaxrl_post.models import decoder, hf
from jaxrl_post.models.presets import PRESETS
from jaxrl_post.parallel import mesh
from jaxrl_post.runs import run_folder

TINY = PRESETS["tiny"]


def given(folder, **model) -> configs.Config:
    characters("0123456789+=").save(folder / "tokenizer")
    c = configs.default()
    c.data.train, c.data.size, c.eval.prompts = "task:sums", 8, 0
    c.engine.max_length, c.sampling.max_tokens = 128, 64
    c.model.tokenizer = str(folder / "tokenizer")
    c.model.update(model)
    return configs.resolve(c)


def test_a_model_that_could_not_be_saved_is_refused_before_it_is_trained(tmp_path, monkeypatch):
    monkeypatch.setitem(PRESETS, "odd", dataclasses.replace(TINY, qk_norm=True, qkv_bias=True))
    with pytest.raises(ValueError, match="cannot be saved as Qwen2ForCausalLM"):
        inputs.gather(given(tmp_path, preset="odd"))
    monkeypatch.setitem(PRESETS, "odd", dataclasses.replace(TINY, qkv_bias=True))
    assert inputs.gather(given(tmp_path, preset="odd")).model.qkv_bias


def read(folder, *overrides) -> inputs.Inputs:
    """The inputs of a config with the files train.jsonl and held_out.jsonl of a folder."""
    c = configs.to_dict(given(folder, preset="tiny"))
    files = [
        f"data.train={folder / 'train.jsonl'}",
        f"eval.data={folder / 'held_out.jsonl'}",
        "data=default",
        "eval.prompts=9",
    ]
    return inputs.gather(
        configs.resolve(
            c, [files[2], *files[:2], files[3], "engine.max_length=32", "sampling.max_tokens=28", *overrides]
        )
    )


def lines(*texts: str) -> str:
    return "".join(f'{{"id": "{text}", "prompt": "{text}", "answer": "1"}}\n' for text in texts)


def test_what_of_the_data_is_not_used_as_it_is_becomes_a_note(tmp_path):
    (tmp_path / "train.jsonl").write_text(lines("1+1=", "11+11=", "2+2="))
    (tmp_path / "held_out.jsonl").write_text(lines("3+3=", "33+33=", "4+4="))
    with pytest.raises(ValueError, match=r"train.jsonl, line 2 .*: the prompt has 6 tokens; it must have 1 to 4"):
        read(tmp_path)
    start = read(tmp_path, "data.overlong=drop")
    assert [prompt.id for prompt in start.train] == ["1+1=", "2+2="] and start.overlong == {"train": 1, "eval": 1}
    assert [note.partition(":")[0].partition("=")[0] for note in start.notes] == [
        "data.train",
        "eval.data",
        "eval.prompts",
    ]
    assert start.notes[2] == f"eval.prompts=9: {tmp_path / 'held_out.jsonl'} has 2, and all of them are used"
    assert [prompt.id for prompt in read(tmp_path, "data.overlong=drop", "eval.prompts=2").held_out] == ["3+3=", "4+4="]
    start = read(tmp_path, "data.overlong=cut", "eval.prompts=3")
    assert start.train.at(0)[1].tokens.size == 4 and len(start.train) == 3 and len(start.notes) == 2


@pytest.mark.parametrize("name, option", [("train.jsonl", "data.train"), ("held_out.jsonl", "eval.data")])
def test_a_source_without_prompts_is_named(tmp_path, name, option):
    for file in ("train.jsonl", "held_out.jsonl"):
        (tmp_path / file).write_text(lines(f"{len(file)}="))
    (tmp_path / name).write_text("")
    with pytest.raises(ValueError, match=f"^{option}={tmp_path / name} has no rows: give at least one$"):
        read(tmp_path)
    (tmp_path / name).write_text(lines("1+1+1="))
    with pytest.raises(
        ValueError, match=f"^{option}={tmp_path / name}: all 1 prompts have more than 4 tokens .* leaves none$"
    ):
        read(tmp_path, "data.overlong=drop")


@pytest.mark.parametrize("source", ["preset", "path"])
def test_weights_are_placed_as_they_are_read_or_drawn(tmp_path, source):
    wanted = decoder.init(dataclasses.replace(TINY, vocab_size=16), 5)
    if source == "path":
        hf.save(tmp_path / "model", dataclasses.replace(TINY, vocab_size=16), wanted)
    start = inputs.gather(
        given(tmp_path, path=str(tmp_path / "model")) if source == "path" else given(tmp_path, preset="tiny")
    )
    home = mesh.param_shardings(mesh.make_mesh(1, 2, 2), decoder.axes(start.model), "learner")
    placed = start.load_params(home)
    wanted = wanted if source == "path" else decoder.init(start.model, 0)
    for leaf, sharding, value in zip(*map(jax.tree.leaves, (placed, home, wanted)), strict=True):
        assert leaf.sharding == sharding and leaf.dtype == np.float32
        np.testing.assert_array_equal(leaf, value)


def test_a_learner_keeps_what_was_loaded_for_it():
    """Given a function it copies nothing; the reference is loaded apart."""
    loaded = []

    def load(shardings):
        loaded.append(mesh.put(decoder.init(TINY, 1), shardings))
        return loaded[-1]

    learner = arms.learner(model=TINY, policy=load, reference=False, given=configs.AlgorithmConfig())
    pairs = zip(jax.tree.leaves(learner.params), jax.tree.leaves(loaded[0]), strict=True)
    assert len(loaded) == 1 and all(ours is theirs for ours, theirs in pairs)


def test_the_date_of_a_run_is_that_of_its_start(tmp_path):
    """A template that asks for the date is told the run's own, also on another day; one that asks for none has none."""
    (tmp_path / "train.jsonl").write_text('{"prompt": [{"role": "user", "content": "1+1="}], "answer": "2"}\n')
    config = configs.resolve(
        {**configs.to_dict(given(tmp_path, preset="tiny")), "data": {"train": str(tmp_path / "train.jsonl")}}
    )
    template = tmp_path / "tokenizer" / "chat_template.jinja"
    template.write_text("{{ messages[0].content }}")
    assert inputs.dated(config) == config
    template.write_text("{{ strftime_now('%d+%m+%Y+%H+%M+%S=') + messages[0].content }}")
    begin = datetime.datetime.now().replace(microsecond=0)
    started = inputs.dated(config)
    assert begin <= datetime.datetime.fromisoformat(started.data.date) <= datetime.datetime.now()
    (tmp_path / "config.json").write_text(json.dumps(configs.to_dict(started) | {"derived": {}}))
    recorded = run_folder.recorded(str(tmp_path))
    again = configs.resolve(configs.to_dict(config), recorded=recorded)
    assert again == started == inputs.dated(again)
    fixed = configs.resolve(configs.to_dict(config), ["data.date=2024-07-26T01:02:03"], recorded=recorded)
    start = inputs.gather(fixed)
    assert start.tokenizer.decode(start.train.at(0)[1].tokens.tolist()) == "26+07+2024+01+02+03=1+1="
    assert start.notes == (
        "data.date=2024-07-26T01:02:03: the chat template says the date, and is told this one in the whole run",
    )
    with pytest.raises(
        ValueError, match="data.date='yesterday' must be a date or a time in ISO form, such as 2026-07-31"
    ):
        configs.resolve(configs.to_dict(config), ["data.date=yesterday"])


@pytest.mark.parametrize("end, told", [("", True), ("{{ eos_token }}", False)])
def test_marks_without_the_end_of_a_turn_are_told_at_the_start(tmp_path, end, told):
    characters("0123456789+=", eos="!").save(tmp_path / "tokenizer")
    talk = [
        {"role": role, "content": text}
        for role, text in (("user", "1+"), ("assistant", "2"), ("user", "3+"), ("assistant", "4"))
    ]
    (tmp_path / "train.jsonl").write_text(json.dumps({"messages": talk}) + "\n")
    (tmp_path / "tokenizer" / "chat_template.jinja").write_text(
        "{% for m in messages %}{% if m.role == 'user' %}{{ m.content }}{% else %}="
        f"{{% generation %}}{{{{ m.content }}}}{end}{{% endgeneration %}}{'' if end else '{{ eos_token }}'}{{% endif %}}{{% endfor %}}"
    )
    c = configs.default()
    c.model.tokenizer, c.model.preset, c.eval.prompts, c.history.epochs = str(tmp_path / "tokenizer"), "tiny", 0, 0
    c.engine.name, c.algorithm.adv_estimator, c.algorithm.loss_mode = "demonstrations", "ones", "sft"
    c.engine.max_length, c.sampling.max_tokens, c.scheduler.group_size = 64, 32, 1
    c.data.train, c.data.assistant_only_loss = str(tmp_path / "train.jsonl"), True
    c.reward.functions = ("jaxrl_post.rewards.length:finished",)
    start = inputs.gather(configs.resolve(c))
    assert start.train.at(0)[1].tokens.size == 3
    wanted = (
        f"data.train={tmp_path / 'train.jsonl'}: 2 of 2 turns of the assistant are trained on without an end token (ids "
        f"{list(start.tokenizer.eos_ids)}), so they do not teach the policy to stop: put {{% endgeneration %}} of the chat template "
        "behind the token that ends a turn"
    )
    assert start.notes == ((wanted,) if told else ())
