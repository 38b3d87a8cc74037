"""Flags of a run: a value behind "=" or as the next argument, and flags that do not go together."""

from __future__ import annotations

import pytest

from jaxrl_post.launch.command_line import Flags, parse


@pytest.mark.parametrize(
    "words, wanted",
    [
        ("--config a.py", Flags(config="a.py")),
        ("--config a.py --run-dir r --resume", Flags(config="a.py", run_dir="r", resume="allowed")),
        ("--config=a.py --resume r", Flags(config="a.py", run_dir="r", resume="required")),
        ("--resume --config a.py --run-dir=r", Flags(config="a.py", run_dir="r", resume="allowed")),
        ("--resume=r", Flags(run_dir="r", resume="required")),
        ("--run-dir r --resume", Flags(run_dir="r", resume="allowed")),
        ("--branch r@3 --run-dir n", Flags(branch="r@3", run_dir="n")),
        ("--config a.py --branch=r", Flags(config="a.py", branch="r")),
        ("--config a.py --config.steps 3 --dry-run", Flags(config="a.py", overrides=("steps=3",), dry_run=True)),
        ("--config a.py --config.sampling.top_k -1", Flags(config="a.py", overrides=("sampling.top_k=-1",))),
        ("--config a.py --dry-run=all", Flags(config="a.py", dry_run=True, every_option=True)),
        ("--config a.py --dry-run --slice v5e-16", Flags(config="a.py", dry_run=True, slice="v5e-16")),
    ],
)
def test_a_value_stands_behind_an_equals_sign_or_a_space(words, wanted):
    assert parse(words.split()) == wanted


@pytest.mark.parametrize(
    "words, sentence",
    [
        ("--config=a.py --config=b.py", "--config is given twice, with 'a.py' and 'b.py': leave one of them out"),
        ("--config=a.py --run-dir=r --resume=s", "--run-dir and --resume=FOLDER both name a folder"),
        ("--config=a.py --resume", "--resume says not which run"),
        ("--resume=r --branch=s", "--branch begins a new run and --resume continues one"),
        ("--config=a.py --dry-run=json", "--dry-run='json' must be --dry-run, or --dry-run=all"),
        ("--dry-run", "no config file: write --config=FILE"),
        ("--branch=r --dry-run --slice=v5e-16", "--slice plans from a config alone"),
        ("--config=a.py --slice=v5e-16", "--slice plans for devices that are not there"),
        ("--config", "unknown argument '--config'; nearest is --config=FILE"),
        ("--config=a.py --run-dir --resume", "unknown argument '--run-dir'; nearest is --run-dir=FOLDER"),
        ("--config=a.py --branch=gs://b/r", "--branch='gs://b/r' is a URL"),
    ],
)
def test_flags_that_do_not_go_together_are_one_sentence(words, sentence):
    with pytest.raises(ValueError) as caught:
        parse(words.split())
    assert str(caught.value).startswith(sentence) and "\n" not in str(caught.value)


def test_an_override_without_a_value_is_left_to_the_reader_of_options():
    assert parse(["--config=a.py", "--config.steps", "--dry-run"]).overrides == ("steps",)
