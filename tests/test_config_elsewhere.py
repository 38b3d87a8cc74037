"""Names of verl, TRL and OpenRLHF: each is answered with options that exist, on the command line, in files and on the page."""

from __future__ import annotations

from pathlib import Path

import pytest
from config_arms import error

from jaxrl_post import config
from jaxrl_post.config import elsewhere, fields, reference
from jaxrl_post.launch.command_line import parse, parser

PAGE = Path(__file__).resolve().parents[1] / "docs" / "coming_from.md"
OPTIONS = {option.name for option in fields.options(config.Config)}


def test_every_answer_names_options_or_flags_that_exist():
    flags = {*parser().forms}
    found = list(elsewhere.known())
    assert len(found) > 150 and {one.framework for one in found} == {"verl", "TRL", "OpenRLHF"}
    for one in found:
        assert set(one.ours) <= OPTIONS | flags, one
        assert one.ours or one.note, one
        assert one.name not in OPTIONS or one.name in one.ours, f"{one.name} is an option here, and never unknown"


def test_the_page_is_written_by_the_table():
    """`python -m jaxrl_post.config.reference coming_from > docs/coming_from.md` brings it up to date."""
    text = reference.coming_from()
    assert PAGE.read_text(encoding="utf-8") == text
    assert "| `optimizer.b2` | `0.95` | 0.999 | 0.999 |" in text
    sections = dict(zip(("verl", "TRL", "OpenRLHF"), text.split("\n## ")[3:], strict=True))
    for one in elsewhere.known():
        (row,) = [line for line in sections[one.framework].splitlines() if line.startswith(f"| {one.name} |")]
        assert row.count(" |") == 3 and one.note in row and all(f"`{name}`" in row for name in one.ours)


@pytest.mark.parametrize(
    "name, answered",
    [
        ("data.train_batch_size", "verl's data.train_batch_size is scheduler.prompts here"),
        ("train_batch_size", "verl's data.train_batch_size is scheduler.prompts here"),
        ("rollout.n", "verl's actor_rollout_ref.rollout.n is scheduler.group_size here"),
        ("actor_rollout_ref.rollout.n", "verl's actor_rollout_ref.rollout.n is scheduler.group_size here"),
        ("ppo_mini_batch_size", "is scheduler.mini_batches here (train_batch_size / ppo_mini_batch_size)"),
        ("algorithm.kl_ctrl.kl_coef", "is algorithm.kl_coef here (with algorithm.use_kl_in_reward)"),
        ("actor_rollout_ref.actor.optim.lr", "is optimizer.lr here"),
        ("clip_ratio", "becomes algorithm.clip_ratio_low and algorithm.clip_ratio_high here"),
        ("trainer.total_epochs", "verl's trainer.total_epochs is steps here (counted in optimizer steps)"),
        ("trainer.nothing", "verl's trainer is divided into the sections checkpoint, eval and mesh here"),
        ("learning_rate", "TRL's learning_rate is optimizer.lr here"),
        ("optimizer.learning_rate", "TRL's learning_rate is optimizer.lr here"),
        ("num_generations", "TRL's num_generations is scheduler.group_size here"),
        ("max_completion_length", "TRL's max_completion_length is sampling.max_tokens here"),
        ("gradient_accumulation_steps", "TRL's gradient_accumulation_steps has no option here: it follows from"),
        ("beta", "TRL's beta is algorithm.kl_loss_coef here"),
        ("n_samples_per_prompt", "OpenRLHF's n_samples_per_prompt is scheduler.group_size here"),
        ("actor_learning_rate", "OpenRLHF's actor_learning_rate is optimizer.lr here"),
    ],
)
def test_another_frameworks_name_is_answered(name, answered):
    sentence = error(f"{name}=1")
    assert sentence.startswith(f"config: unknown name {name!r}; ") and answered in sentence


@pytest.mark.parametrize("name", ["kl_coef", "temperature", "engine.lr", "scheduler.grup_size"])
def test_a_name_of_ours_is_taken_for_ours(name):
    assert "nearest valid name is" in error(f"{name}=1") and "'s " not in error(f"{name}=1")


def test_names_in_a_config_file_are_answered(tmp_path):
    file = tmp_path / "c.py"
    for line, answered in (
        ("c.train_batch_size = 8", "verl's data.train_batch_size is scheduler.prompts here"),
        ("c.actor_rollout_ref.rollout.n = 8", "verl's actor_rollout_ref is divided into the sections model"),
        ("c.optimizer.learning_rate = 1.0", "TRL's learning_rate is optimizer.lr here"),
    ):
        file.write_text(f"from jaxrl_post.config import default\ndef get_config():\n    c = default()\n    {line}\n")
        with pytest.raises(ValueError, match=f"c.py:4: unknown name .*; {answered}"):
            config.load(str(file))


@pytest.mark.parametrize(
    "argument, answered",
    [
        (
            "data.train_batch_size=8",
            "verl's data.train_batch_size is scheduler.prompts here, set by --config.NAME=VALUE",
        ),
        ("--learning_rate", "TRL's learning_rate is optimizer.lr here, set by --config.NAME=VALUE"),
        ("--n-samples-per-prompt=4", "OpenRLHF's n_samples_per_prompt is scheduler.group_size here"),
        ("--optimizer.lr=1e-5", "write --config.optimizer.lr=1e-5"),
        ("scheduler.prompts", "write --config.scheduler.prompts=VALUE"),
        ("--steps=3", "write --config.steps=3"),
    ],
)
def test_arguments_of_another_framework_are_answered(argument, answered):
    with pytest.raises(ValueError) as caught:
        parse(["--config=a.py", argument])
    assert str(caught.value).startswith(f"unknown argument {argument!r}; ") and answered in str(caught.value)
