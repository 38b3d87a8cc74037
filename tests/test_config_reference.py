"""The options as text: the page is the schema's, the help names every option."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from jaxrl_post import config
from jaxrl_post.config import fields, reference

ROOT = Path(__file__).resolve().parents[1]
OPTIONS = [*fields.options(config.Config)]


@pytest.fixture(scope="module")
def page():
    return reference.page()


def test_the_page_is_written_by_the_schema(page):
    """`python -m jaxrl_post.config.reference > docs/options.md` brings it up to date."""
    assert (ROOT / "docs" / "options.md").read_text(encoding="utf-8") == page


def test_the_command_writes_the_page(page):
    done = subprocess.run(
        [sys.executable, "-m", "jaxrl_post.config.reference"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    assert done.stdout == page and done.stderr == ""


def test_the_page_has_every_option_with_all_that_is_known_of_it(page):
    lines = page.splitlines()
    for option in OPTIONS:
        (row,) = [line for line in lines if line.startswith(f"| `{option.name}` |")]
        assert row.count(" |") == 6 and option.about.doc in row and f"`{option.default!r}`" in row
    (lane,) = [line for line in lines if "`scheduler.lane`" in line and line.startswith("|")]
    assert lane == (
        "| `scheduler.lane` | float | `0.0` | 0.0 to 1.0 | share of the surplus | How much of the surplus goes to a long round at "
        "once, where past rollouts of the prompt were long. This saves tokens, and not always time. Read only where "
        "scheduler.name is 'tail_batching'. |"
    )
    (width,) = [line for line in lines if line.startswith("| `engine.row_sizes`")]
    assert "| list of int | `(64, 128)` | | rows |" in width


def test_what_differs_from_the_defaults_is_a_line_each():
    given = config.default()
    given.model.preset, given.steps, given.eval.task = "tiny", 7, {"more": 0.5}
    given.engine.row_sizes = (64,)
    head, *lines = reference.changed(config.resolve(given)).splitlines()
    assert head.startswith("4 options differ from their defaults; --dry-run=all prints every option")
    assert [line.split() for line in lines] == [
        ["steps", "7", "(default", "10)"],
        ["model.preset", "'tiny'", "(default", "'')"],
        ["engine.row_sizes", "(64,)", "(default", "(64,", "128))"],
        ["eval.task", "{'more':", "0.5}", "(default", "{})"],
    ]


def test_help_names_the_sections():
    text = reference.help_on(["--help"], "usage: this")
    assert text.startswith("usage: this\n")
    for name in ("run", "engine", "scheduler", "speculation", "history"):
        assert f"\n  {name} " in text
    assert "  optimizer    AdamW." in text and "`" not in text.partition("engine ")[2].splitlines()[0]


@pytest.mark.parametrize("section", reference.sections())
def test_help_on_a_section_has_each_of_its_options(section):
    text = reference.help_on(["--help", section], "")
    own = [option for option in OPTIONS if option.name.rpartition(".")[0] == ("" if section == "run" else section)]
    assert own and all(f"\n  {option.name} = {option.default!r}; " in text for option in own)
    assert max(map(len, text.splitlines())) <= 180


def test_help_says_range_unit_meaning_and_condition():
    text = reference.help_on(["--help", "scheduler"], "")
    assert "  scheduler.over = 1.0; float; at least 1.0; times prompts\n    Groups that a short round starts" in text
    assert "    Read only where scheduler.name is 'tail_batching' or 'rollpacker'." in text
    assert "scheduler.name = 'sync'; str; sync, tail_batching, rollpacker, pipeline, auto\n" in text
    assert reference.help_on(["--help", "engine.slots"], "") == reference.help_on(["engine", "--help"], "")


def test_help_on_an_unknown_section_is_one_sentence():
    with pytest.raises(
        ValueError, match="--help enigne: no such section; nearest is 'engine', all are run, model, mesh"
    ):
        reference.help_on(["--help", "enigne"], "")


@pytest.mark.parametrize(
    "words, begins",
    [
        ("--help=engine", "engine: "),
        ("-h engine", "engine: "),
        ("--help steps", "run: "),
        ("--help --config.engine.slots", "engine: "),
        ("--config=a.py --help", "usage"),
        ("--config a.py --dry-run -h", "usage"),
    ],
)
def test_help_is_asked_for_in_every_usual_way(words, begins):
    assert reference.asks(words.split()) and reference.help_on(words.split(), "usage").startswith(begins)


def test_help_on_another_frameworks_name_is_answered():
    with pytest.raises(
        ValueError, match="--help rollout.n: no such section; verl's .*rollout.n is scheduler.group_size here; "
    ):
        reference.help_on(["--help", "rollout.n"], "")
