"""Ground truths: rows without one, and reward functions that need one, by file and line."""

from __future__ import annotations

import json
import math

import pyarrow
import pyarrow.parquet as parquet
import pytest
from refusals import refused

from jaxrl_post.data import prompts
from jaxrl_post.data.columns import Columns
from jaxrl_post.rewards import signatures, worker


class Letters:
    longest = 1

    def encode(self, text, special=True):
        return [ord(letter) for letter in text]


def read(path, **columns):
    return prompts.tokenised(prompts.read(path, Columns(**columns)), Letters(), chat=None, limit=99)


def check(path, function, **columns):
    """As launch/assemble.py does before a run: every prompt against what the function says it needs."""
    loaded = worker.load(function)
    for prompt in read(path, **columns):
        signatures.check(prompt, function, loaded.needs, loaded.truths, loaded.instead, loaded.reader)


def written(folder, *rows):
    (folder / "f.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder / "f.jsonl"


GOOD = {"prompt": "1", "answer": "1", "label": "1"}
EXACT = "jaxrl_post.rewards.math:exact"
FREE = [f"jaxrl_post.rewards.format:{name}" for name in ("thinking", "hashes", "boxed", "required")]
FREE += [f"jaxrl_post.rewards.length:{name}" for name in ("finished", "brevity", "overlong")]
BAD = [
    ({"prompt": "2"}, {}, "there is no column 'reward_model.ground_truth' (nor 'answer'); its columns are prompt"),
    ({"prompt": "2"}, {"format": "slime"}, "there is no column 'label'; its columns are prompt"),
    ({"prompt": "2", "label": None}, {"format": "slime"}, "column 'label' is null"),
    ({"prompt": "2", "answer": math.nan}, {}, "column 'answer' is NaN"),
    ({"prompt": "2", "answer": " "}, {}, "column 'answer' is empty"),
    ({"prompt": "2", "reward_model": {"ground_truth": None}}, {}, "column 'reward_model.ground_truth' is null"),
    ({"prompt": "2", "reward_model": None}, {}, "there is no column 'reward_model.ground_truth'"),
]


@pytest.mark.parametrize("row, columns, words", BAD)
def test_a_function_that_needs_a_truth_refuses_a_row_without(tmp_path, row, columns, words):
    path = written(tmp_path, GOOD, row)
    with pytest.raises(ValueError) as caught:
        check(path, EXACT, **columns)
    assert f"data: {path}, line 2: {words}" in str(caught.value) and "\n" not in str(caught.value)
    assert str(caught.value).endswith(
        f"but reward function {EXACT!r} needs a ground truth; give one, or set the function's attribute needs_truth = False"
    )
    assert read(path, **columns)[1].answer == ""  # and never the text "null" or "NaN"


@pytest.mark.parametrize("function", FREE)
def test_rewards_of_form_and_length_need_none(tmp_path, function):
    for row, columns, _ in BAD:
        check(written(tmp_path, GOOD, row), function, **columns)


@pytest.mark.parametrize("lacking", [{}, {"answer": None}, {"answer": ""}, {"answer": None, "test_list": []}])
def test_programs_need_tests_in_the_truth_or_beside_it(tmp_path, lacking):
    function = "jaxrl_post.rewards.code:tests"
    rows = [{"prompt": "1", "answer": "assert f() == 1"}]
    rows += [{"prompt": "2", "answer": None, "test_list": ["assert f() == 1"]}, {"prompt": "3", "test": "assert f()"}]
    check(written(tmp_path, *rows), function)
    path = written(tmp_path, *rows, {"prompt": "4", **lacking})
    refused(f"data: {path}, line 4: .* give one, or the column test_list or test, or set", check, path, function)


def test_texts_and_falsy_values_are_truths(tmp_path):
    rows = [
        {"prompt": str(i), "answer": value} for i, value in enumerate(["null", "NaN", "None", 0, False, [], [None]])
    ]
    path = written(tmp_path, *rows)
    check(path, EXACT)
    assert [prompt.answer for prompt in read(path)] == ["null", "NaN", "None", "0", "false", "[]", "[null]"]


def test_functions_get_a_truth_as_it_stands_in_the_file(tmp_path):
    values = [{"target": 24, "numbers": [2, 3]}, ["1/2", "0.5"], 3, 0.5, False, "3", "[1]"]
    path = written(
        tmp_path, *({"prompt": str(i), "reward_model": {"ground_truth": one}} for i, one in enumerate(values))
    )
    table = pyarrow.table({"prompt": ["a", "b"], "answer": [["1/2", "0.5"], ["2"]]})
    parquet.write_table(table, tmp_path / "f.parquet")
    for prompt, value in zip(
        [*read(path), *read(tmp_path / "f.parquet")], [*values, ["1/2", "0.5"], ["2"]], strict=True
    ):
        assert signatures.columns(prompt)["ground_truth"] == signatures.columns(prompt)["answer"] == value
        assert prompt.truth == value and type(prompt.truth) is type(value)
        assert prompt.answer == (value if isinstance(value, str) else json.dumps(value))


def test_tests_that_test_nothing_are_refused_by_file_and_line(tmp_path):
    function = "jaxrl_post.rewards.code:tests"
    path = written(tmp_path, {"prompt": "1", "answer": "assert f() == 1"}, {"prompt": "2", "answer": {"a": 1}})
    refused("f.jsonl, line 2: reward function .*tests nothing of the program; give stdin pairs", check, path, function)


def test_parquet_names_the_row(tmp_path):
    rows = [{"prompt": "1", "answer": 1.5}, {"prompt": "2", "answer": math.nan}, {"prompt": "3", "answer": None}]
    for kept, word in ((rows[:2], "is NaN"), (rows[::2], "is null")):
        parquet.write_table(pyarrow.Table.from_pylist(kept), tmp_path / "f.parquet")
        refused(rf"f.parquet, row 2: column 'answer' {word}, but reward function", check, tmp_path / "f.parquet", EXACT)


def test_functions_say_what_they_need(tmp_path, monkeypatch):
    (tmp_path / "own.py").write_text(
        """
from jaxrl_post.rewards import needs_no_truth
from jaxrl_post.rewards.judge import Judge

def verls(data_source, solution_str, ground_truth, extra_info): return 1.0
@needs_no_truth
def free(data_source, solution_str, ground_truth, extra_info): return 1.0
def trls(completions, ground_truth, **columns): return [1.0]
def trls_solution(completions, solution): return [1.0]
def trls_default(completions, answer=None): return [1.0]
def trls_any(completions, **columns): return [1.0]
def trls_free(completions, answer): return [None]
trls_free.needs_truth = False
def trls_all(completions, **columns): return [1.0]
trls_all.needs_truth = True
def wrong(completions): return [1.0]
wrong.needs_truth = "yes"
blind = Judge("http://localhost", model="m", question="{answer}?")
seeing = Judge("http://localhost", model="m", question="{answer}? {truth}")
"""
    )
    own = tmp_path / "own.py"
    truths = {
        "verls": ("",),
        "free": (),
        "trls": ("ground_truth",),
        "trls_solution": ("solution",),
        "trls_default": (),
        "trls_any": (),
        "trls_free": (),
        "trls_all": ("",),
        "blind": (),
        "seeing": ("",),
    }
    assert {name: worker.load(f"{own}:{name}").truths for name in truths} == truths
    with pytest.raises(worker.Refused, match="needs_truth must be True or False, got 'yes'"):
        worker.load(f"{own}:wrong")
    path = written(tmp_path, {"prompt": "1", "solution": "1"}, {"prompt": "2", "solution": None})
    with pytest.raises(ValueError, match="f.jsonl, line 2: column 'solution' is null, but reward function"):
        check(path, f"{own}:trls_solution", format="trl")
    refused("line 1: no column is named as the answer", check, path, f"{own}:verls", format="trl")
    with pytest.raises(ValueError, match=r"needs the column 'level', which prompt '\w+' \(.*f.jsonl, line 1\) has not"):
        signatures.check(read(path, format="trl")[0], "f", ["level"], [])
