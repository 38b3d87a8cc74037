"""JSON of others' files: what is no JSON, no UTF-8, too deep or half a character is one sentence with its place."""

from __future__ import annotations

import json
import os

import pytest

from jaxrl_post.ring import json_text


@pytest.mark.parametrize("path", ["Qwen/Qwen2.5-0.5B", "openai/gsm8k", "HuggingFaceTB/SmolLM2-135M-Instruct"])
def test_a_hubs_name_is_said_not_to_be_downloaded(path, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert f"nothing of a hub is downloaded here: save '{path}' in a folder first" in json_text.of_hub(path)
    (tmp_path / path.split("/")[0]).mkdir()
    assert json_text.of_hub(path) == ""  # a folder of that name is there: the user meant his own


@pytest.mark.parametrize(
    "path", ["policy", "/data/policy", "runs/demo/policy", "rows/train.jsonl", "./policy", "../policy"]
)
def test_a_path_is_no_hubs_name(path, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert json_text.of_hub(path) == ""


@pytest.mark.parametrize(
    "text,words",
    [
        ("{", "HERE: no JSON: .* at character 2"),
        ('{\n"a" 1}', "HERE: no JSON: .* at line 2, character 5"),
        ("[" * 100_000, "more than 64 levels"),
        ("[" * 65 + "]" * 65, "more than 64 levels"),
        ("9" * 5000, "thousands of digits"),
        (r'{"a": "b\ud800"}', r"half of a surrogate pair, U\+D800 behind"),
        (r'{"\uDFFF": 1}', r"half of a surrogate pair, U\+DFFF"),
    ],
)
def test_a_text_that_is_refused_is_one_sentence(text, words):
    with pytest.raises(ValueError, match=words) as caught:
        json_text.parsed(text, "HERE")
    assert type(caught.value) is ValueError and "\n" not in str(caught.value) and len(str(caught.value)) < 300


def test_what_json_says_is_what_the_library_says():
    deep = "[" * 64 + "]" * 64
    for text in ('{"a": [1, 2.5, null, "\\ud83d\\ude00 \\ud7ff"]}', deep, "[" + "[]," * 500 + "{}]"):
        assert json_text.parsed(text, "HERE") == json.loads(text)


def test_a_file_that_cannot_be_read(tmp_path):
    file = tmp_path / "a.json"
    for data, words in (
        (b'{"a": "\xff"}', "is no UTF-8 text: .* at byte 7"),
        (b"[]", "must hold a JSON object, got a list"),
    ):
        file.write_bytes(data)
        with pytest.raises(ValueError, match=f"HERE: .*{words}"):
            json_text.read_object(file, "HERE")
    with pytest.raises(ValueError, match="HERE: has 2 bytes, more than the 1"):
        json_text.read(file, "HERE", most=1)
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "zeros").symlink_to("/dev/zero")
    for name in ("pipe", "zeros"):
        with pytest.raises(ValueError, match="HERE: cannot be read: it is a folder, a pipe or a device"):
            json_text.read(tmp_path / name, "HERE")
    with pytest.raises(ValueError, match="HERE: no such file"):
        json_text.read(tmp_path / "b.json", "HERE")
    with pytest.raises(ValueError, match="HERE: cannot be read"):
        json_text.read(tmp_path, "HERE")


def test_a_value_in_an_error_is_cropped():
    assert json_text.shown("a") == "'a'" and len(json_text.shown("a" * 5000)) == 80
    assert json_text.shown(10**5000) == "a int" and json_text.shown("\ud800") == r"'\ud800'"
