"""What a row becomes under verl's, TRL's and slime's names and a mapping: every expected row is written by hand."""

from __future__ import annotations

import json

import pytest
from refusals import refused

from jaxrl_post.data import prompts
from jaxrl_post.data.columns import Columns
from jaxrl_post.rewards import math

ASKED = [{"role": "system", "content": "s"}, {"role": "user", "content": "1+1="}]


def row(given, **columns) -> dict:
    out = Columns(**columns).row("f, line 1", given)
    assert out.pop("where") == "f, line 1"
    return out


def test_trl_rows_keep_every_other_column():
    got = row({"id": 7, "prompt": ASKED, "solution": "2", "level": 3}, format="trl", named={"answer": "solution"})
    assert got == {"id": "7", "prompt": ASKED, "answer": "2", "source": "", "extra": {"solution": "2", "level": 3}}
    assert row({"id": 7, "prompt": "1="}, format="trl")["answer"] == ""


def test_slime_rows():
    given = {"prompt": "1+1=", "label": 2, "metadata": {"source_name": "sums", "index": 5, "split": "train"}, "k": 1}
    assert row(given, format="slime") == {
        "id": "sums/train/5",
        "prompt": "1+1=",
        "answer": "2",
        "value": 2,
        "source": "sums",
        "extra": {"label": 2, "k": 1, "source_name": "sums", "index": 5, "split": "train"},
    }


def test_a_mapping_replaces_a_role_s_column():
    given = {
        "data_source": "d",
        "prompt": "p",
        "question": "q",
        "gold": {"a": 5},
        "reward_model": {"ground_truth": "g"},
    }
    assert row(given | {"extra_info": {"index": 1}}, named={"prompt": "question", "answer": "gold.a"}) == {
        "id": "d/1",
        "prompt": "q",
        "answer": "5",
        "value": 5,
        "source": "d",
        "extra": {"prompt": "p", "reward_model": {"ground_truth": "g"}, "index": 1},
    }
    assert row({"a.b": "flat", "a": {"b": "deep"}}, format="trl", named={"prompt": "a.b"})["prompt"] == "flat"


def test_the_first_column_of_a_role_wins():
    both = {"prompt": "1=", "reward_model": {"ground_truth": "g"}, "answer": "a", "data_source": "d", "source": "s"}
    got = row(both)
    assert (got["answer"], got["source"]) == ("g", "d")
    assert got["extra"] == {"answer": "a", "source": "s"}  # what fills no role is not lost


def test_the_other_keys_of_an_object_that_a_mapping_reads_are_kept():
    given = {"q": {"text": "1=", "gold": {"a": 5, "unit": "km"}, "level": 2}, "k": 1}
    got = row(given, format="trl", named={"prompt": "q.text", "answer": "q.gold.a"})
    assert (got["prompt"], got["answer"]) == ("1=", "5")
    assert got["extra"] == {"q": {"gold": {"unit": "km"}, "level": 2}, "k": 1}


def test_rows_of_preferences_are_named():
    refused("f, line 1: is a row of preferences", row, {"chosen": ASKED, "rejected": ASKED}, format="trl")


def test_a_template_is_for_the_user_s_last_word():
    begun = [{"role": "user", "content": "1+1="}, {"role": "assistant", "content": "It is"}]
    assert row({"prompt": begun, "answer": ""}, template="<{prompt}>")["prompt"] == begun


def test_templates_and_chat():
    think = Columns(template="{prompt} Think {x}.", source="own")
    assert row({"prompt": "1+{a}=", "answer": ""}, template="{prompt} Think {x}.")["prompt"] == "1+{a}= Think {x}."
    assert think.row("w", {"prompt": ASKED, "answer": ""})["prompt"] == [
        ASKED[0],
        {"role": "user", "content": "1+1= Think {x}."},
    ]
    assert think.row("w", {"prompt": "a", "answer": ""})["source"] == "own"
    assert row({"prompt": "1", "answer": ""}, chat=True, template="<{prompt}>")["prompt"] == [
        {"role": "user", "content": "<1>"}
    ]
    # the id is that of the data, whatever is put around the prompt
    assert row({"prompt": "1", "answer": ""}, template="<{prompt}>")["id"] == row({"prompt": "1", "answer": ""})["id"]


def test_gsm8k_through_the_mapping(data_dir):
    columns = Columns(
        format="trl",
        named={"prompt": "question", "answer": "answer"},
        source="openai/gsm8k",
        chat=True,
        template='{prompt} End with "####".',
    )
    train, test = (prompts.read(data_dir / "gsm8k" / f"{part}.jsonl", columns) for part in ("train", "test"))
    assert len(train) == 7473 and len(test) == 1319 and not {r["id"] for r in train} & {r["id"] for r in test}
    first = train[0]
    assert first["prompt"][0]["content"].startswith("Natalia sold clips to 48 of her friends in April")
    assert first["prompt"][0]["content"].endswith('April and May? End with "####".')
    assert first["answer"].endswith("#### 72") and first["source"] == "openai/gsm8k" and first["extra"] == {}
    # both scorers read the whole solution as the ground truth
    for said, strict, flexible in (("so 72\n#### 72", 1, 1), ("The answer is 72.", 0, 1), ("#### 71", 0, 0)):
        arguments = (first["source"], said, first["answer"], {})
        assert (math.strict(*arguments), math.flexible(*arguments)) == (strict, flexible)
    wrong = [r["answer"] for r in train + test if math.strict("", r["answer"], r["answer"], {}) != 1]
    assert not wrong


@pytest.mark.parametrize(
    "given, words",
    [
        (dict(format="verll"), "data.format: 'verll' is not one of verl, trl, slime; nearest is 'verl'"),
        (
            dict(named={"promt": "x"}),
            "data.columns: 'promt' is not one of id, prompt, answer, source, extra, completion; nearest is 'prompt'",
        ),
        (dict(named={"prompt": 3}), "prompt must name a column, got 3"),
        (dict(named={"prompt": ""}), "prompt must name a column"),
        (dict(template="x"), "data.template='x' must hold {prompt}"),
    ],
)
def test_wrong_columns_are_refused(given, words):
    with pytest.raises(ValueError) as caught:
        Columns(**given)
    assert words in str(caught.value)


@pytest.mark.parametrize(
    "given, columns, words",
    [
        (
            {"prompt": "1", "label": "2", "metadata": 3},
            dict(format="slime"),
            "line 2, column 'metadata': must be an object, got 3",
        ),
        ({"q": ""}, dict(format="trl", named={"prompt": "q"}), "line 2, column 'q': is empty"),
        ({"q": "1"}, dict(format="trl"), "line 2: there is no column 'prompt'; its columns are q"),
    ],
)
def test_a_bad_row_is_named_under_any_format(tmp_path, given, columns, words):
    good = {"prompt": "1", "q": "1", "label": "2", "answer": "3"}
    (tmp_path / "f.jsonl").write_text(f"{json.dumps(good)}\n{json.dumps(given)}\n")
    with pytest.raises(ValueError) as caught:
        prompts.read(tmp_path / "f.jsonl", Columns(**columns))
    assert words in str(caught.value) and "\n" not in str(caught.value)
