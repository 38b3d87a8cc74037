"""Parquet against the JSONL of the same rows, verl's real files, and one sentence for what cannot be read."""

from __future__ import annotations

import datetime
import json
import random
import sys

import numpy as np
import pytest
from refusals import refused

from jaxrl_post.data import chat, files, prompts
from jaxrl_post.data.columns import Columns

pyarrow = pytest.importorskip("pyarrow")
parquet = pytest.importorskip("pyarrow.parquet")

VERL = [
    {
        "data_source": "openai/gsm8k",
        "prompt": [{"role": "user", "content": f"{i}+1="}],
        "ability": "math",
        "reward_model": {"style": "rule", "ground_truth": str(i + 1)},
        "extra_info": {"split": "train", "index": i},
    }
    for i in range(5)
]


def test_parquet_says_what_jsonl_says(tmp_path):
    parquet.write_table(pyarrow.Table.from_pylist(VERL), tmp_path / "rows.parquet", row_group_size=2)
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in VERL))
    ours, theirs = (prompts.read(tmp_path / f"rows.{kind}") for kind in ("parquet", "jsonl"))
    assert [row.pop("where").rpartition(", ")[2] for row in ours] == [f"row {i}" for i in range(1, 6)]
    assert [row.pop("where").rpartition(", ")[2] for row in theirs] == [f"line {i}" for i in range(1, 6)]
    assert ours == theirs and ours[3]["answer"] == "4" and ours[3]["id"] == "openai/gsm8k/train/3"


def test_verls_real_parquet(data_dir):
    """TinyZero's rows have a prompt and nothing to check it with."""
    folder = data_dir / "verl-tiny-llama"
    bare = prompts.read(folder / "train.parquet")[0]
    assert bare["where"].endswith("train.parquet, row 1") and bare["answer"] == ""
    assert bare["lacks"].startswith(
        "there is no column 'reward_model.ground_truth' (nor 'answer'); its columns are prompt"
    )
    rows = prompts.read(folder / "train.parquet", Columns(named={"answer": ""}))
    assert len(rows) == 800 and rows[0]["prompt"] == [{"content": "8,3:9,4", "role": "user"}]
    assert rows[0]["answer"] == ""
    assert chat.load(folder).render(rows[0]["prompt"]) == "8,3:9,4"
    assert len(prompts.read(folder / "test.parquet", Columns(named={"answer": ""}))) == 200


def test_nulls_dates_and_bytes(tmp_path):
    day = datetime.date(2024, 7, 26)
    rows = [
        {
            "prompt": [{"role": "user", "content": "1", "name": None}, {"role": "user", "content": "2", "name": "a"}],
            "answer": "1",
            "day": day,
        }
    ]
    parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "rows.parquet")
    (got,) = prompts.read(tmp_path / "rows.parquet")
    assert got["prompt"] == [{"role": "user", "content": "1"}, {"role": "user", "content": "2", "name": "a"}]
    assert got["extra"] == {"day": "2024-07-26"}
    image = {"prompt": "1", "answer": "1", "images": [{"bytes": b"\x89PNG"}]}
    parquet.write_table(
        pyarrow.Table.from_pylist([{"prompt": "0", "answer": "1", "images": []}, image]), tmp_path / "images.parquet"
    )
    with pytest.raises(ValueError, match="images.parquet, row 2, column 'images', column 'bytes': holds bytes"):
        prompts.read(tmp_path / "images.parquet")


def test_nanoseconds_lose_no_digit(tmp_path):
    """Those that Python's times hold are told as before, others as text of nine digits, at any depth."""
    kind = pyarrow.timestamp("ns")
    columns = {
        "when": pyarrow.array([1_700_000_000_000_001_000, None], kind),
        "fine": pyarrow.array([1_700_000_000_000_000_001, None], kind),
        "deep": pyarrow.array([[{"at": 1}], [{"at": 5_000}]], pyarrow.list_(pyarrow.struct([("at", kind)]))),
        "time": pyarrow.array([1, 2], pyarrow.time64("ns")),
        "took": pyarrow.array([1, 2_000], pyarrow.duration("ns")),
    }
    parquet.write_table(pyarrow.table(columns), tmp_path / "a.parquet")
    first, second = (row for _, row in files.objects(tmp_path / "a.parquet"))
    assert first["when"] == "2023-11-14 22:13:20.000001" and first["fine"] == "2023-11-14 22:13:20.000000001"
    assert first["deep"] == [{"at": "1970-01-01 00:00:00.000000001"}] and first["time"] == "00:00:00.000000001"
    assert second["when"] is None and second["fine"] is None and (first["took"], second["took"]) == (1, 2000)


def test_values_of_a_program_become_what_json_has():
    row = {"a": np.int64(3), "b": np.arange(2), "c": (1, None), "d": {"e": datetime.date(2026, 1, 2), "f": True}}
    got = files.plain("row 1", row)
    assert got == {"a": 3, "b": [0, 1], "c": [1, None], "d": {"e": "2026-01-02", "f": True}}
    assert type(got["a"]) is int
    refused("row 1, column 'a': holds a complex", files.plain, "row 1", {"a": 1j})


def test_a_bad_row_of_parquet_is_named(tmp_path):
    bad = [*VERL[:3], VERL[3] | {"prompt": []}]
    parquet.write_table(pyarrow.Table.from_pylist(bad), tmp_path / "rows.parquet")
    with pytest.raises(ValueError, match="rows.parquet, row 4, column 'prompt': must be a text or a list of messages"):
        prompts.read(tmp_path / "rows.parquet")
    (tmp_path / "cut.parquet").write_bytes((tmp_path / "rows.parquet").read_bytes()[:-9])
    refused("cut.parquet, after row 0: no whole Parquet file", prompts.read, tmp_path / "cut.parquet")


def test_without_pyarrow_it_is_one_sentence(tmp_path, monkeypatch):
    (tmp_path / "rows.parquet").write_bytes(b"")
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    refused(r"needs pyarrow: pip install 'jaxrl_post\[parquet\]'", list, files.objects(tmp_path / "rows.parquet"))


def test_every_flipped_bit_of_parquet_is_read_or_refused_in_one_sentence(tmp_path):
    whole, file = tmp_path / "whole.parquet", tmp_path / "rows.parquet"
    parquet.write_table(pyarrow.Table.from_pylist(VERL), whole)
    data, noise, refused = whole.read_bytes(), random.Random(0), 0
    for _ in range(200):
        bad = bytearray(data)
        bad[noise.randrange(len(bad))] ^= 1 << noise.randrange(8)
        file.write_bytes(bad)
        try:
            prompts.read(file)
        except ValueError as error:
            assert type(error) is ValueError and "rows.parquet" in str(error) and "\n" not in str(error)
            refused += 1
    assert refused > 60


@pytest.mark.parametrize(
    "line,words",
    [
        (b'{"prompt": ' + b"[" * 5000 + b"]" * 5000 + b', "answer": "1"}', "more than 64 levels"),
        (b'{"prompt": "a\\udfff", "answer": "1"}', "half of a surrogate pair"),
        (b'{"prompt": "\xed\xa0\x80", "answer": "1"}', "is no UTF-8 text"),
        (b'{"prompt": 1' + b"0" * 5000 + b', "answer": "1"}', "a number has thousands of digits"),
    ],
)
def test_a_line_that_json_could_not_say_is_named(tmp_path, line, words):
    (tmp_path / "rows.jsonl").write_bytes(b'{"prompt": "1", "answer": "1"}\n' * 2000 + line)
    refused(f"rows.jsonl, line 2001: .*{words}", prompts.read, tmp_path / "rows.jsonl")
