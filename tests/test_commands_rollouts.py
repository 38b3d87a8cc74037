"""`rollouts`: every field of a row against the made rollouts, each filter, JSON, Parquet, and mistakes in one sentence."""

from __future__ import annotations

import dataclasses
import json
import sys

import made_runs
import numpy as np
import pytest

from jaxrl_post import __main__ as commands
from jaxrl_post.commands import rollouts
from jaxrl_post.data import tokenizer
from jaxrl_post.ring.types import Finish, Group, Prompt, Rollout, RolloutId


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    rollouts = {
        1: [
            made_runs.group("p/1", ["#2", "#34"], [1.0, 0.25], prompt="1+1="),
            made_runs.group("p/2", ["#5"], [None], prompt="2+3=", source="other"),
        ],
        2: [made_runs.group("p:3", ["12#"], [0.5], prompt="9+1=", versions=[[0, 1, 3]], drafted=1, epoch=4)],
    }
    evaluations = {2: [made_runs.group("e", ["#7"], [1.0], purpose="eval", attempt=1)]}
    return made_runs.run(tmp_path_factory.mktemp("rollouts") / "run", rollouts=rollouts, evaluations=evaluations)


def asked(capsys, run, *flags):
    """The rows that the command prints as JSON."""
    assert commands.main(["rollouts", str(run), "--json", *flags]) == 0
    return [json.loads(line) for line in capsys.readouterr().out.splitlines()]


def test_a_row_says_what_the_log_holds(run, capsys):
    rows = asked(capsys, run)
    assert [row["rollout"] for row in rows] == ["train:p/1:0:0", "train:p/1:0:1", "train:p/2:0:0", "train:p:3:4:0:0"]
    assert rows[3] == {
        "rollout": "train:p:3:4:0:0",
        "purpose": "train",
        "step": 2,
        "prompt_id": "p:3",
        "epoch": 4,
        "sample": 0,
        "attempt": 0,
        "source": "sums",
        "prompt": "9+1=",
        "answer": "2",
        "text": "12#",
        "spans": [{"sampled": True, "text": "12#"}],
        "reward": 0.5,
        "components": {"acc": 0.0},
        "finish": "eos",
        "num_tokens": 3,
        "num_prompt_tokens": 4,
        "first_version": 0,
        "last_version": 3,
        "num_versions": 3,
        "drafted_share": pytest.approx(1 / 3),
        "mean_logprob": -0.5,
    }
    assert rows[2]["reward"] is None and rows[2]["components"] == {}


@pytest.mark.parametrize(
    "flags, texts",
    [
        (["--step=1"], ["#2", "#34", "#5"]),
        (["--step", "2:7"], ["12#"]),
        (["--prompt=p/1"], ["#2", "#34"]),
        (["--prompt", "+1="], ["#2", "#34", "12#"]),
        (["--source=other"], ["#5"]),
        (["--min-reward=0.5"], ["#2", "12#"]),
        (["--max-reward", "0.5"], ["#34", "12#"]),
        (["--min-reward=0.3", "--max-reward=0.6"], ["12#"]),
        (["--limit=1"], ["#2"]),
        (["--purpose=eval"], ["#7"]),
        (["--prompt=nothing"], []),
    ],
)
def test_filters(run, capsys, flags, texts):
    assert [row["text"] for row in asked(capsys, run, *flags)] == texts


def test_the_screen_shows_texts_and_how_many(run, capsys):
    assert commands.main(["rollouts", str(run), "--step=2"]) == 0
    assert capsys.readouterr().out == (
        "train:p:3:4:0:0   step 2, reward 0.5, acc 0, ends by eos, 3 tokens, weights 0 to 3, drafted 0.33\n"
        "  prompt  '9+1='   answer '2'\n  text    '12#'\n1 rollouts\n"
    )


def test_who_spoke_in_a_conversation_is_seen():
    words = tokenizer.characters("0123456789+=# ")
    prompt = Prompt(id="p", tokens=words.encode("1+1="))
    sampled = np.array([True, True, False, False, True, True])
    told = Rollout.written(
        RolloutId(0, "train", 0, "p", 0), prompt, [*words.encode("3"), 0, *words.encode("# 2"), 0], Finish.EOS
    )
    told = dataclasses.replace(told, sampled=sampled)
    assert rollouts.spans(told, words.decode) == [
        {"sampled": True, "text": "3<eos>"},
        {"sampled": False, "text": "# "},
        {"sampled": True, "text": "2<eos>"},
    ]
    group = Group.unscored(prompt, [told])
    shown = rollouts.text(rollouts._row(1, group, 0, "1+1=", words.decode)).splitlines()
    assert shown[2:] == ["  sampled  '3<eos>'", "  observed '# '", "  sampled  '2<eos>'"]


def test_parquet_holds_the_same_rows(run, capsys, tmp_path):
    parquet = pytest.importorskip("pyarrow.parquet")
    rows, file = asked(capsys, run), tmp_path / "rows.parquet"
    assert commands.main(["rollouts", str(run), f"--parquet={file}"]) == 0
    assert "4 rollouts in" in capsys.readouterr().out
    read = parquet.read_table(file).to_pylist()
    assert [row | {"components": dict(row["components"])} for row in read] == rows
    assert commands.main(["rollouts", str(run), f"--parquet={file}"]) == 1
    assert "exists already and is not written over" in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["rows.parquet"]


def test_a_log_that_breaks_off_leaves_no_half_of_a_file(tmp_path):
    pytest.importorskip("pyarrow.parquet")

    def broken():
        raise ValueError("damaged")
        yield

    with pytest.raises(ValueError, match="damaged"):
        rollouts.write_parquet(tmp_path / "rows.parquet", broken())
    assert not list(tmp_path.iterdir())


def test_a_screen_shows_a_few_and_says_how_to_see_more(run, capsys, monkeypatch):
    monkeypatch.setattr(rollouts, "SHOWN", 2)
    assert commands.main(["rollouts", str(run)]) == 0
    assert "2 rollouts; --limit=N shows more" in capsys.readouterr().out
    assert len(asked(capsys, run)) == 4


def test_parquet_without_pyarrow_is_one_sentence(run, capsys, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    assert commands.main(["rollouts", str(run), f"--parquet={tmp_path / 'rows.parquet'}"]) == 1
    assert "--parquet needs pyarrow: pip install 'jaxrl_post[parquet]'" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    "flags, words",
    [
        (["--min-rewrd=1"], "unknown argument '--min-rewrd=1'; nearest is --min-reward"),
        (["--step=3:1"], "'3:1' ends before it begins; the nearest valid value is 1:3"),
        (["--step=x"], "'x' must be a step A or steps A:B"),
        (["--step=7"], "has logged rollouts of 2 steps from 1 to 2; nearest is 2"),
        (["--source=othr"], "--source='othr': no rollout has it; nearest is 'other'"),
        (["--min-reward=nan"], "'nan' must be a finite number"),
        (["--min-reward=2", "--max-reward=1"], "--min-reward=2 is above --max-reward=1"),
        (["--limit=1", "--limit=2"], "--limit is given twice, with 1 and 2: leave one of them out"),
        (["--limit=0"], "'0' must be a whole number of at least 1"),
        (["--purpose=test"], "invalid choice: 'test'"),
        (["--json", "--parquet=x"], "two forms: name one"),
    ],
)
def test_mistakes_are_one_sentence(run, capsys, flags, words):
    assert commands.main(["rollouts", str(run), *flags]) == 1
    said = capsys.readouterr().err
    assert said.startswith("error: ") and said.count("\n") == 1 and words in said


def test_what_is_no_run_is_one_sentence(tmp_path, capsys):
    assert commands.main(["rollouts", str(tmp_path)]) == 1
    assert "is no folder of a run: it has no config.json" in capsys.readouterr().err
    assert commands.main(["rollouts", str(made_runs.run(tmp_path / "new"))]) == 1
    assert "has logged no rollouts yet" in capsys.readouterr().err


@pytest.mark.parametrize("command", ["rollouts", "compare", "replay"])
def test_help_says_every_flag(command, capsys):
    with pytest.raises(SystemExit) as end:
        commands.main([command, "--help"])
    assert end.value.code == 0 and f"python -m jaxrl_post {command} " in capsys.readouterr().out
