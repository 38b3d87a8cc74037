"""Prompts: the order against its definition, verl's rows, and one sentence per kind of bad row."""

from __future__ import annotations

import json
from types import SimpleNamespace

import pytest
from refusals import refused

from jaxrl_post.data import chat, prompts, tasks, tokenizer
from jaxrl_post.data.prompts import Prompts

LETTERS = tokenizer.characters("0123456789+=, :abcdef")


def made(count: int, **given):
    rows = [{"id": str(i), "prompt": f"{i}=", "answer": str(i), "source": "s", "extra": {}} for i in range(count)]
    return prompts.tokenised(rows, LETTERS, **dict(chat=None, limit=16) | given)


def epochs(data: Prompts, count: int) -> list[list[str]]:
    size = len(data)
    for position in range(size * count):
        assert data.at(position)[0] == position // size
    return [[data.at(epoch * size + i)[1].id for i in range(size)] for epoch in range(count)]


def test_every_epoch_is_another_permutation_and_a_function_of_seed():
    rows = made(50)
    first, again, other = Prompts(rows, 3), Prompts(rows, 3), Prompts(rows, 4)
    late = again.at(140)  # random access needs no history
    order = epochs(first, 4)
    assert epochs(again, 4) == order and late[1].id == order[2][40]
    assert all(sorted(epoch) == sorted(order[0]) for epoch in order) and len({tuple(e) for e in order}) == 4
    # run seeds 3 and 4 share no epoch, though grain derives epoch e of seed s from s + e
    assert not {tuple(e) for e in order} & {tuple(e) for e in epochs(other, 4)}
    assert epochs(Prompts(rows, 3, shuffle=False), 2) == [[str(i) for i in range(50)]] * 2
    assert Prompts(made(1), 2**70).at(5)[0] == 5
    refused("there are no prompts", Prompts, (), 0)


def write(tmp_path, *rows) -> str:
    file = tmp_path / "rows.jsonl"
    file.write_text("\n".join(row if isinstance(row, str) else json.dumps(row) for row in rows) + "\n")
    return str(file)


VERL = {
    "data_source": "openai/gsm8k",
    "prompt": [{"role": "user", "content": "1+1="}],
    "ability": "math",
    "reward_model": {"style": "rule", "ground_truth": "2"},
    "extra_info": {"split": "train", "index": 7},
}


def test_verl_rows(tmp_path):
    plain = {"id": "x", "prompt": "2+2=", "answer": 4, "source": "own", "extra": {"level": 1}}
    bare = {"prompt": "3=", "answer": "3"}
    path = write(tmp_path, VERL, "", plain, bare)
    one, two, three = prompts.read(path)
    assert [row.pop("where") for row in (one, two, three)] == [f"{path}, line {n}" for n in (1, 3, 4)]
    assert one == {
        "id": "openai/gsm8k/train/7",
        "prompt": VERL["prompt"],
        "answer": "2",
        "source": "openai/gsm8k",
        "extra": {"ability": "math", "split": "train", "index": 7},
    }
    assert two == {"id": "x", "prompt": "2+2=", "answer": "4", "value": 4, "source": "own", "extra": {"level": 1}}
    moved = prompts.read(write(tmp_path, bare, VERL))[0]
    assert moved.pop("where").endswith("line 1")
    assert moved == three and len(three["id"]) == 16
    assert prompts.read(write(tmp_path, bare | {"answer": "4"}))[0]["id"] != three["id"]


def test_verl_messages_go_through_the_template(tmp_path, data_dir):
    template = chat.load(data_dir / "verl-tiny-llama")
    rows = prompts.rows(write(tmp_path, VERL), seed=0, split="train", size=1)
    (prompt,) = prompts.tokenised(rows, LETTERS, chat=template, limit=16)
    assert prompt.tokens.tolist() == LETTERS.encode("1+1=") and prompt.messages == tuple(VERL["prompt"])
    assert prompt.answer == "2" and prompt.extra["index"] == 7 and prompt.id == "openai/gsm8k/train/7"
    refused("has no chat template", prompts.tokenised, rows, LETTERS, chat=None, limit=16)


@pytest.mark.parametrize(
    "row,words",
    [
        ("{", "line 2: no JSON: .* at character 2"),
        ("[1]", "line 2: must be an object, got a list"),
        ({"answer": "1"}, "line 2: there is no column 'prompt'; its columns are answer"),
        ({"prompt": "", "answer": "1"}, "line 2, column 'prompt': is empty"),
        ({"prompt": 5, "answer": "1"}, "line 2, column 'prompt': must be a text or a list of messages, got '5'"),
        (
            {"prompt": [{"role": "user"}], "answer": "1"},
            r"line 2, column 'prompt\[0\]': must be an object with role and",
        ),
        ({"prompt": "1", "answer": "1", "extra_info": 3}, "line 2, column 'extra_info': must be an object, got 3"),
        ({"prompt": "1", "answer": "1", "data_source": 3}, "line 2, column 'data_source': must be a text, got 3"),
    ],
)
def test_a_bad_row_is_named(tmp_path, row, words):
    caught = refused(words, prompts.read, write(tmp_path, VERL, row))
    assert "rows.jsonl" in caught


def test_files_that_are_none(tmp_path, data_dir):
    refused("there is no file", prompts.read, tmp_path / "none.jsonl")
    with pytest.raises(ValueError, match="has the ending '.bin'; known are .jsonl, .json, .parquet"):
        prompts.read(data_dir / "tinystories-260k" / "tok512.bin")
    (tmp_path / "latin.jsonl").write_bytes(b'{"prompt": "\xe9"}')
    refused("no UTF-8", prompts.read, tmp_path / "latin.jsonl")


def test_rows_that_cannot_be_prompts():
    refused(r"row 11 \(id '10'\): the prompt has 3 tokens; it must have 1 to 2", made, 12, limit=2)
    row = {"id": "a", "prompt": "1", "answer": "1", "source": ""}
    refused("row 2 .*has the id of data, row 1", prompts.tokenised, [row, row], LETTERS, chat=None, limit=4)
    with pytest.raises(ValueError, match=r"row 1 \(id 'a'\): the tokenizer has no token for '\?'"):
        prompts.tokenised([row | {"prompt": "1?"}], LETTERS, chat=None, limit=4)


def test_tasks_by_name(monkeypatch):
    def rows(seed, split, size, digits):
        return [
            {"id": f"{split}{seed}-{i}", "prompt": "1" * digits, "answer": "", "source": "t", "extra": {}}
            for i in range(size)
        ]

    monkeypatch.setattr(tasks, "TASKS", {"count": SimpleNamespace(rows=rows)})
    got = prompts.rows("task:count", seed=5, split="eval", size=2, arguments={"digits": 3})
    assert [row["id"] for row in got] == ["eval5-0", "eval5-1"] and got[0]["prompt"] == "111"
    refused("there is no task 'cout'; tasks are count", prompts.rows, "task:cout", seed=5, split="eval", size=2)
    with pytest.raises(ValueError, match="do not fit task 'count': got an unexpected keyword argument 'digit'"):
        prompts.rows("task:count", seed=5, split="eval", size=2, arguments={"digits": 3, "digit": 3})


class Counted:
    """A tokenizer that counts what reaches it."""

    def __init__(self, tokens):
        self.tokens, self.longest, self.seen = tokens, tokens.longest, 0

    def encode(self, text, special=True):
        self.seen += len(text)
        return self.tokens.encode(text, special)


def test_a_row_is_measured_before_it_is_tokenised():
    words = Counted(LETTERS)  # its longest tokens are <eos> and <unk>
    row = {"id": "a", "prompt": "1" * 16, "answer": "1", "source": ""}
    assert len(prompts.tokenised([row], words, chat=None, limit=16)[0].tokens) == 16 and words.seen == 16
    template = chat.Chat(template="{{ messages[0].content * 30 }}")
    for prompt in ("1" * 81, [{"role": "user", "content": "111"}]):
        with pytest.raises(
            ValueError, match=r"row 1 \(id 'a'\): the prompt has 8\d|90 characters; 16 tokens .* hold 80"
        ):
            prompts.tokenised([row | {"prompt": prompt}], words, chat=template, limit=16)
    assert words.seen == 16
    with pytest.raises(ValueError, match="the messages have .* bytes as JSON; at most 16777216"):
        prompts.tokenised(
            [row | {"prompt": [{"role": "user", "content": "1" * (1 << 24)}]}], words, chat=template, limit=16
        )


@pytest.mark.parametrize("argument", [(1, "a"), None, "3", 3.5, True])
def test_a_tasks_argument_of_another_kind_is_one_sentence(argument):
    with pytest.raises(ValueError, match="argument shortest=.* of task 'sums' must be int"):
        prompts.rows("task:sums", seed=0, split="train", size=2, arguments={"shortest": argument})
    assert prompts.rows("task:sums", seed=0, split="train", size=2, arguments={"tail": 0})
