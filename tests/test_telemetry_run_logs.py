"""Names of rollouts and the logs of a run: every name reads back, and what is not there is named with its nearest."""

from __future__ import annotations

import json
import re
from pathlib import Path

import hypothesis
import made_runs
import pytest
from hypothesis import strategies as st

from jaxrl_post.ring.types import RolloutId
from jaxrl_post.runs import run_logs
from jaxrl_post.runs.run_logs import Name

ROOT = Path(__file__).resolve().parents[1]
COUNT = st.integers(0, 10**9)
PROMPT = st.text(st.sampled_from("ab:0 7/@'train"), min_size=1, max_size=9)


@hypothesis.given(st.builds(Name, st.none() | COUNT, PROMPT, COUNT, COUNT, COUNT | st.just(0)))
def test_a_name_reads_back(name):
    assert run_logs.parsed_name(str(name)) == name
    id = RolloutId(3, name.purpose, name.epoch, name.prompt_id, name.sample, name.attempt)
    assert run_logs.name_of(id, name.step or 0) == name and name.is_of(id)
    assert not name.is_of(id._replace(sample=name.sample + 1)) and not name.is_of(id._replace(purpose="other"))


@pytest.mark.parametrize(
    "text, name",
    [
        ("p:1:2", Name(None, "p", 1, 2)),
        ("train:p:1:2:3", Name(None, "p", 1, 2, 3)),
        ("a:b:1:2", Name(None, "a:b", 1, 2)),
        ("eval@7:a:b:0:2:1", Name(7, "a:b", 0, 2, 1)),
    ],
)
def test_names_that_are_typed_by_hand(text, name):
    assert run_logs.parsed_name(text) == name


@pytest.mark.parametrize("text", ["", "p", "p:1", "p:1:x", "train:1:2", "eval@7:1:2", "p:-1:2", "p:1:²"])
def test_what_is_no_name_is_one_sentence(text):
    with pytest.raises(ValueError, match="names no rollout: write train:PROMPT:EPOCH:SAMPLE or eval@STEP:"):
        run_logs.parsed_name(text)


@pytest.fixture
def logs(tmp_path):
    train = {
        1: [made_runs.group("sums/1", ["#2", "#3"], [1.0, 0.0]), made_runs.group("sums/2", ["#5"], [0.0])],
        3: [made_runs.group("sums/1", ["#4", "#6"], [0.0, 0.0], epoch=1)],
    }
    evaluations = {step: [made_runs.group("e", [f"#{step}"], [1.0], purpose="eval")] for step in (0, 2)}
    return run_logs.opened(made_runs.run(tmp_path / "run", rollouts=train, evaluations=evaluations))


def test_a_rollout_is_found_by_its_name(logs):
    for text, step, tokens in (
        ("sums/1:1:1", 3, "#6"),
        ("train:sums/2:0:0", 1, "#5"),
        ("eval@2:e:0:0", 2, "#2"),
        ("eval@0:e:0:0", 0, "#0"),
    ):
        found = logs.find(run_logs.parsed_name(text))
        assert found[0] == step and made_runs.LETTERS.decode(found[1].tokens) == tokens


@pytest.mark.parametrize(
    "text, words",
    [
        ("sums/1:1:5", "nearest is 'train:sums/1:1:1', one of 4 of that prompt"),
        ("sum/2:0:0", "nearest is 'train:sums/2:0:0', one of 1 of that prompt"),
        ("eval@1:e:0:0", "has no evaluation of step 1; it has those of steps [0, 2]"),
        ("eval@2:f:0:0", "nearest is 'eval@2:e:0:0'"),
    ],
)
def test_a_rollout_that_was_not_logged_has_a_nearest(logs, text, words):
    with pytest.raises(ValueError) as error:
        logs.find(run_logs.parsed_name(text))
    assert words in str(error.value)


def test_logs_of_several_processes_are_those_of_process_0(logs, tmp_path):
    several = tmp_path / "several"
    several.mkdir()
    (several / "config.json").write_bytes((logs.folder / "config.json").read_bytes())
    logs.folder.rename(several / "process_0")
    assert run_logs.opened(several).steps("train") == [1, 3]


def test_damaged_files_are_one_sentence(logs):
    (logs.folder / "metrics.jsonl").write_text("{\n")
    with pytest.raises(ValueError, match=r"metrics\.jsonl, line 1: no JSON"):
        _ = logs.rows
    (logs.folder / "rollouts" / "step_000001.npz").write_bytes(b"no archive")
    with pytest.raises(ValueError, match="is no rollout log, or is damaged"):
        logs.find(run_logs.parsed_name("sums/1:0:0"))
    (logs.folder / "config.json").write_text(json.dumps([]))
    with pytest.raises(ValueError, match="must hold a JSON object"):
        run_logs.opened(logs.folder)


def test_there_is_one_reader_of_a_runs_folder():
    """What shows a run names no file of its folder. `serve` looks for the config of an exported policy."""
    shown = [*ROOT.glob("jaxrl_post/commands/*.py"), *ROOT.glob("jaxrl_post/telemetry/page/*.py")]
    shown.append(ROOT / "jaxrl_post" / "telemetry" / "screen.py")
    named = re.compile(r'"(?:config\.json|summary\.json|metrics\.jsonl|index\.jsonl)"|np\.load|zipfile')
    assert {path.name for path in shown if named.search(path.read_text())} == {"serve.py"}
