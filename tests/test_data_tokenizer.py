"""Tokenizers against llama2.c's documented text, a hand-run merge, and what Hugging Face's own library says."""

from __future__ import annotations

import json
import struct

import pytest
import tokenizers
import word_kinds
from refusals import refused

from jaxrl_post.data import tokenizer


@pytest.fixture(scope="module")
def stories(data_dir):
    return tokenizer.load(data_dir / "tinystories-260k" / "tok512.bin")


def golden(data_dir) -> str:
    text = (data_dir / "tinystories-260k" / "stories260K.md").read_text()
    return text.split("-t 0.0\n")[1].split("\n```")[0]


def test_llama2c_reads_the_real_vocabulary(stories):
    assert stories.vocab_size == 512 and stories.bos_id == 1 and 1 in stories.eos_ids
    assert stories.pieces[3 + 0x41] == b"<0x41>"


def test_llama2c_round_trip_of_the_documented_story(stories, data_dir):
    story = golden(data_dir)
    ids = stories.encode(story)
    assert ids[0] == 1 and stories.decode(ids) == story and max(ids) < 512
    # 256 generated tokens are printed in stories260K.md, the first from BOS alone
    assert len(ids) == 257


def test_llama2c_bytes_specials_and_leading_space(stories):
    text = "naïve 漢字 \n#"
    ids = stories.encode(text)
    assert stories.decode(ids) == text
    assert [i - 3 for i in ids if 3 <= i < 259][-8:-2] == list("漢字".encode())  # then "\n" and "#"
    assert stories.decode(ids[1:]) == " " + text  # only BOS drops the space
    assert stories.encode("a", special=False) == [stories.ids[b"a"]]
    assert stories.encode("") == [1] and stories.decode([1, 1]) == ""
    assert stories.decode([3 + 0xE6]) == "\ufffd"


def test_llama2c_merges_best_score_first(tmp_path):
    """Vocabulary a b c ab bc abc: bc scores best, then abc; ab must lose although it stands left."""
    extra = [(" ", -9.0), ("a", -9.0), ("b", -9.0), ("c", -9.0), ("ab", -2.0), ("bc", -1.0), ("abc", -3.0)]
    pieces = [(b"<unk>", 0.0), (b"\n<s>\n", 0.0), (b"\n</s>\n", 0.0)]
    pieces += [(b"<0x%02X>" % i, 0.0) for i in range(256)] + [(text.encode(), score) for text, score in extra]
    file = tmp_path / "tok.bin"
    file.write_bytes(struct.pack("<i", 7) + b"".join(struct.pack("<fi", s, len(p)) + p for p, s in pieces))
    got = tokenizer.load(file)
    words = {text: 259 + i for i, (text, _) in enumerate(extra)}
    assert got.encode("abc") == [1, words[" "], words["abc"]]
    assert got.encode("abab", special=False) == [words["ab"], words["ab"]]
    assert got.encode("abcb", special=False) == [words["abc"], words["b"]]
    assert got.encode("acbc", special=False) == [words["a"], words["c"], words["bc"]]
    file.write_bytes(file.read_bytes()[:-2])
    refused("ends inside token 265", tokenizer.load, file)


def test_a_model_file_is_no_vocabulary(data_dir):
    refused("no llama2.c vocabulary", tokenizer.load, data_dir / "tinystories-260k" / "stories260K.bin")
    assert tokenizer.beside(data_dir / "tinystories-260k" / "stories260K.bin").name == "tok512.bin"


def test_characters_survive_saving(tmp_path):
    made = tokenizer.characters("0123456789+=# \n")
    made.save(tmp_path)
    for got in (made, tokenizer.load(tmp_path), tokenizer.load(tmp_path / "tokenizer.json")):
        assert got.encode("12+3 =\n15#") == [2, 3, 11, 4, 14, 12, 15, 2, 6, 13]
        assert got.decode([2, 3, 11, 0, 4]) == "12+3" and got.decode([2, 0], skip_special=False) == "1<eos>"
        assert got.eos_ids == (0,) and got.vocab_size == 17 and got.special_ids == (0,) and got.bos_id is None
        refused("no token for 'x' at character 2", got.encode, "1+x")
    refused("twice", tokenizer.characters, "aa")


@pytest.fixture
def folder(tmp_path):
    """A byte-level BPE as Llama 3 and Qwen have it, with a BOS added by its post-processor."""
    model = tokenizers.Tokenizer(tokenizers.models.BPE())
    model.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    model.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=300,
        special_tokens=["<bos>", "<end>", "<turn>"],
        initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    model.train_from_iterator(["the cat and the hat"] * 3, trainer)
    model.post_processor = tokenizers.processors.TemplateProcessing(single="<bos> $A", special_tokens=[("<bos>", 0)])
    model.save(str(tmp_path / "tokenizer.json"))
    return tmp_path


def write(folder, **files):
    for name, content in files.items():
        (folder / f"{name}.json").write_text(json.dumps(content))


def test_eos_comes_from_the_files_beside(folder):
    assert tokenizer.load(folder).eos_ids == ()
    write(folder, config={"eos_token_id": 1, "bos_token_id": 0})
    assert tokenizer.load(folder).eos_ids == (1,) and tokenizer.load(folder).bos_id == 0
    write(folder, tokenizer_config={"eos_token": {"content": "<turn>"}, "bos_token": "<bos>"})
    assert tokenizer.load(folder).eos_ids == (1, 2)  # of config.json, and the eos_token
    write(folder, generation_config={"eos_token_id": [1, 2]})
    assert tokenizer.load(folder).eos_ids == (1, 2)
    write(folder, generation_config={"eos_token_id": 4096})
    refused("eos_token_id 4096 is outside its vocabulary of", tokenizer.load, folder)


def test_byte_level_text_round_trips(folder):
    got = tokenizer.load(folder)
    text = "the hat 漢 naïve\n\t<turn>"
    ids = got.encode(text)
    assert ids[0] == 0 and got.encode(text, special=False) == ids[1:] and ids[-1] == 2
    assert got.decode(ids) == text.removesuffix("<turn>") and got.decode(ids, skip_special=False) == "<bos>" + text


def test_a_bos_stands_once_where_the_text_begins_with_it(folder):
    got = tokenizer.load(folder)
    plain = got.encode("the hat")
    assert got.encode("<bos>the hat") == plain and plain[0] == 0 != plain[1]
    assert got.encode("<bos>the hat", special=False) == plain and got.encode("<bos>") == [0] == got.encode("")
    assert got.encode("the <bos>hat").count(0) == 2, "one in the middle stays"


def test_a_written_unknown_token_is_kept_and_an_unknown_character_is_not():
    model = tokenizers.Tokenizer(tokenizers.models.WordLevel({"<unk>": 0, "a": 1, "b": 2}, unk_token="<unk>"))
    model.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    model.add_special_tokens(["<unk>"])
    got = tokenizer._built(model, (), None)
    assert got.encode("a <unk> b") == [1, 0, 2]
    refused("has no token for 'c' at character 8", got.encode, "a <unk> c")


def test_an_unknown_character_of_a_unigram_is_not_taken():
    """Its library names no unknown token, and shows the character itself as the token of id 0."""
    got = tokenizer._built(word_kinds.made("unigram"), (), None)
    assert got.encode("<unk>", special=False) == [0]
    refused("has no token for 'ж' at character 4", got.encode, "the ж")


def test_ends_of_a_model_of_several_parts(folder):
    write(folder, config={"text_config": {"eos_token_id": [1, 2]}})
    assert tokenizer.load(folder).eos_ids == (1, 2)
    write(folder, generation_config={}, config={"eos_token_id": [2, 0]}, tokenizer_config={"eos_token": "<turn>"})
    assert tokenizer.load(folder).eos_ids == (2, 0)


def test_what_is_no_tokenizer_is_refused(tmp_path, data_dir):
    refused("holds no tokenizer.json", tokenizer.load, data_dir / "verl-tiny-llama")
    refused("there is no tokenizer at", tokenizer.load, tmp_path / "nothing")
    (tmp_path / "tokenizer.json").write_text("{}")
    refused("has no 'model'", tokenizer.load, tmp_path)
    (tmp_path / "tokenizer.json").write_text("{")
    refused("tokenizer.json: no JSON", tokenizer.load, tmp_path)


WORDS = {"version": "1.0", "model": {"type": "WordLevel", "vocab": {"a": 0, "<unk>": 1}, "unk_token": "<unk>"}}


@pytest.mark.parametrize(
    "change, files, sentence",
    [
        ({"model": {}}, {}, "is a tokenizer.json that the tokenizers library does not take: .*line 1"),
        ({"model": 3}, {}, "does not take"),
        ({"model": {"type": "BPE", "vocab": {}, "merges": ["a"]}}, {}, "does not take: .*Merges"),
        ({"version": "2.0"}, {}, "does not take: .*version '2.0'"),
        (
            {"pre_tokenizer": {"type": "Split", "pattern": {"Regex": "[("}, "behavior": "Isolated", "invert": False}},
            {},
            "does not take: .*char-class",
        ),
        ({"model": {"type": "WordLevel", "vocab": {}, "unk_token": "<unk>"}}, {}, "has a vocabulary of 0 tokens"),
        (
            {"model": {"type": "WordLevel", "vocab": {"a": 0}, "unk_token": "<none>"}},
            {},
            "names the unknown token '<none>'",
        ),
        ({}, {"generation_config": {"eos_token_id": "a"}}, "eos_token_id='a' must be an id or a list of ids"),
        ({}, {"config": {"eos_token_id": [0, None]}}, "eos_token_id=.0, None. must be an id or a list of ids"),
        ({}, {"tokenizer_config": {"eos_token": 5}}, "eos_token=5 must be a text"),
        ({}, {"tokenizer_config": {"bos_token": {"content": []}}}, "bos_token=.* must be a text"),
    ],
)
def test_a_malformed_tokenizer_is_one_sentence(tmp_path, change, files, sentence):
    write(tmp_path, tokenizer=WORDS | change, **files)
    caught = refused(sentence, tokenizer.load, tmp_path)
    assert str(tmp_path) in caught


def test_a_regular_expression_without_end_is_one_sentence(tmp_path):
    """The library panics, with an error that is no Exception."""
    split = {"type": "Split", "pattern": {"Regex": "(a+)+$"}, "behavior": "Isolated", "invert": False}
    write(tmp_path, tokenizer=WORDS | {"pre_tokenizer": split})
    with pytest.raises(ValueError, match="the tokenizer fails on a text: .*retry-limit"):
        tokenizer.load(tmp_path).encode("a" * 40 + "b")


def test_the_longest_token_bounds_what_tokens_can_hold(tmp_path, data_dir):
    stories = tokenizer.load(data_dir / "tinystories-260k" / "tok512.bin")
    assert (
        stories.longest == max(len(stories.pieces[i]) for i in range(512)) and tokenizer.characters("ab").longest == 5
    )
    text = "Once upon a time, there was a little girl named Lily."
    assert len(text) <= stories.longest * len(stories.encode(text, special=False))
