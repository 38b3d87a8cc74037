"""Pieces of a text: joined they are the text, whatever bytes a token holds."""

from __future__ import annotations

import json

import hypothesis
import hypothesis.strategies as st
import tokenizers

from jaxrl_post.data import tokenizer
from jaxrl_post.runs.run_logs import opened
from jaxrl_post.telemetry.page import rollouts

TEXTS = ("the cat sat", "naïve 漢字 🙂🙂 end", "  two  spaces\n")


def byte_level() -> tokenizer.JsonTokenizer:
    """A byte-level BPE whose only tokens are bytes, so that each character beyond ASCII has several tokens."""
    model = tokenizers.Tokenizer(tokenizers.models.BPE())
    model.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    model.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=257,
        initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
        special_tokens=["<eos>"],
        show_progress=False,
    )
    model.train_from_iterator([], trainer)
    return tokenizer._built(model, (0,), None)


WORDS = byte_level()


@hypothesis.given(st.one_of(st.sampled_from(TEXTS), st.text(max_size=30)))
@hypothesis.settings(deadline=None, max_examples=60)
def test_pieces_joined_are_the_text(text):
    ids = WORDS.encode(text)
    pieces = rollouts.pieces(WORDS, ids)
    assert len(pieces) == len(ids) and "".join(pieces) == WORDS.decode(ids, skip_special=False) == text


def test_a_character_belongs_to_the_token_that_completes_it():
    assert rollouts.pieces(WORDS, WORDS.encode("a🙂b")) == ["a", "", "", "", "🙂", "b"]
    assert rollouts.pieces(WORDS, [*WORDS.encode("a"), 0]) == ["a", "<eos>"]


def test_bytes_that_are_no_character_are_told_at_once_and_not_again():
    broken = WORDS.encode("🙂")[:2]
    assert "".join(rollouts.pieces(WORDS, [*broken, *WORDS.encode("ab")])).endswith("ab")


def test_without_a_tokenizer_ids_are_shown(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"model": {"path": "", "tokenizer": ""}}))
    assert rollouts.words_of(opened(tmp_path)) is None
    assert rollouts.pieces(None, [3, 14]) == ["[3]", "[14]"]


def test_the_tokenizer_is_that_of_the_policy_else_that_of_the_config(tmp_path):
    config = {"model": {"path": str(tmp_path / "model"), "tokenizer": ""}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    tokenizer.characters("ab").save(tmp_path / "model")
    assert rollouts.words_of(opened(tmp_path)).vocab_size == 4
    tokenizer.characters("abcdef").save(tmp_path / "policy")
    assert rollouts.words_of(opened(tmp_path)).vocab_size == 8
