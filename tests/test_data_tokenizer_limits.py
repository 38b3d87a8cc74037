"""A tokenizer.json that could take the process is refused with one sentence; those in use are read."""

from __future__ import annotations

import base64
import json
import struct

import pytest
import word_kinds
from refusals import refused

from jaxrl_post.data import tokenizer

WORDS = json.loads(word_kinds.made("llama2").to_str())


def load(folder, **changes):
    (folder / "tokenizer.json").write_text(json.dumps(WORDS | changes))
    return tokenizer.load(folder)


def replace(pattern, content):
    return {"type": "Replace", "pattern": pattern, "content": content}


def sequence(*parts, of="normalizers"):
    return {"type": "Sequence", of: list(parts)}


LETTER, NOTHING = {"String": "a"}, {"Regex": ""}
CHARSMAP = base64.b64encode(struct.pack("<I", 0) + b"x" * 100_000).decode()
TOKENS = {f"t{index}": index for index in range((1 << 20) + 1)}
BERT = {"type": "WordPiece", "unk_token": "a", "continuing_subword_prefix": "##", "vocab": {"a": 0}}
TEMPLATE = {"type": "TemplateProcessing", "pair": [], "special_tokens": {}}


@pytest.mark.parametrize(
    "changes, sentence",
    [
        ({"normalizer": replace(LETTER, "b" * 50_000_000)}, "content of a 'Replace' has 50000000 characters"),
        ({"normalizer": sequence(*[replace(LETTER, "aa")] * 40)}, "can make a text 128 times as long; at most 64"),
        ({"normalizer": sequence(*[replace(NOTHING, "a")] * 40)}, "can make a text 128 times as long"),
        ({"normalizer": sequence(*[replace({"Regex": "(?=a)"}, "a")] * 40)}, "can make a text 128 times as long"),
        ({"decoder": sequence(*[replace(LETTER, "aa")] * 40, of="decoders")}, "decoder: its parts can make a text 128"),
        ({"decoder": {"type": "Strip", "content": " ", "start": 0, "stop": 2}}, "only stop=0 is taken"),
        ({"normalizer": {"type": "Prepend", "prepend": "a" * 9000}}, "prepend of a 'Prepend' has 9000 characters"),
        ({"normalizer": {"type": "Precompiled", "precompiled_charsmap": CHARSMAP}}, "can make a text 782 times"),
        ({"normalizer": sequence(*[{"type": "Lowercase"}] * 300)}, "normalizer has 301 parts; at most 256"),
        (
            {"post_processor": TEMPLATE | {"single": [{"Sequence": {"id": "A", "type_id": 0}}] * 99}},
            "single has 99 parts",
        ),
        (
            {
                "post_processor": TEMPLATE
                | {"single": [], "special_tokens": {"a": {"id": "a", "ids": [0] * 9000, "tokens": ["a"] * 9000}}}
            },
            "adds 18000 tokens to a text",
        ),
        ({"model": WORDS["model"] | {"vocab": TOKENS}}, "vocab has 1048577 tokens; at most 1048576"),
        ({"model": WORDS["model"] | {"vocab": {"a" * 5000: 0}}}, "the token 'a.* has 5000 characters; at most 4096"),
        ({"model": BERT | {"max_input_chars_per_word": 10**9}}, "max_input_chars_per_word is 1000000000 characters"),
        ({"added_tokens": [{"id": 0, "content": "a" * 5000}]}, "added_tokens: the token 'a.* has 5000 characters"),
        ({"normalizer": json.loads('{"type":"Sequence","normalizers":[' * 60 + "]}" * 60)}, "more than 64 levels"),
    ],
)
def test_a_hostile_file_is_one_sentence(tmp_path, changes, sentence):
    caught = refused(sentence, load, tmp_path, **changes)
    assert len(caught) < 500


@pytest.mark.parametrize("name", word_kinds.NAMES)
def test_every_kind_of_tokenizer_is_read(tmp_path, name):
    word_kinds.made(name).save(str(tmp_path / "tokenizer.json"))
    assert tokenizer.load(tmp_path).encode("the cat", special=False)


def test_truncation_and_padding_are_off(tmp_path):
    cut = {"direction": "Right", "max_length": 3, "strategy": "LongestFirst", "stride": 0}
    padded = {"strategy": {"Fixed": 100_000_000}, "direction": "Right", "pad_to_multiple_of": None}
    padded |= {"pad_id": 0, "pad_type_id": 0, "pad_token": "<unk>"}
    plain, changed = load(tmp_path), load(tmp_path, truncation=cut, padding=padded)
    text = "How many birds fly in the wood?"
    assert changed.encode(text) == plain.encode(text) and len(plain.encode(text)) > 10
    changed.save(tmp_path / "saved")
    assert json.loads((tmp_path / "saved" / "tokenizer.json").read_text())["padding"] is None
