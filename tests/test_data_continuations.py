"""The text of a rollout: that of prompt and rollout together, without that of the prompt, by the library's own decode."""

from __future__ import annotations

import os
import time

import numpy as np
import pytest
import word_kinds

from jaxrl_post.data import tokenizer
from jaxrl_post.data.continuations import Pieces
from jaxrl_post.engine.host.sequence import SequenceState
from jaxrl_post.ring.types import Finish, Sampling
from jaxrl_post.serve.forms import RunningText


def rest(words, before, ids, **how):
    """decode(before + ids) minus decode(before), both whole, by the library."""
    head, every = (words.model.decode([*map(int, some)], **how) for some in (before, [*before, *ids]))
    return every[len(os.path.commonprefix([head, every])) :]  # noqa: RUF071


@pytest.fixture(scope="module", params=word_kinds.NAMES)
def words(request):
    return tokenizer._built(word_kinds.made(request.param), (2,), None)


def test_a_few_tokens_of_the_prompt_give_the_text_that_all_give(words):
    dice = np.random.default_rng(5)
    for case in range(150):
        ids = dice.integers(
            0, words.vocab_size, 6 if case % 2 else words.vocab_size
        )  # few ids: runs of bytes and spaces
        before, after = (ids[dice.integers(0, ids.size, dice.integers(low, 24))] for low in (1, 0))
        for skip in (True, False):
            got = words.decode(after, skip, before=before)
            assert got == rest(words, before, after, skip_special_tokens=skip), (before, after)


def test_text_and_token_texts_of_a_completion():
    words = tokenizer._built(word_kinds.made("llama2"), (2,), None)
    prompt, every = words.encode("How many"), words.encode("How many birds fly in the wood?")
    ids = every[len(prompt) :]
    assert every[: len(prompt)] == prompt and words.decode(ids) == "birds fly in the wood?"
    assert words.decode(ids, before=prompt) == " birds fly in the wood?"
    assert "".join(Pieces(words.decode, prompt).more(ids)) == " birds fly in the wood?"


def test_a_body_behind_the_head_of_a_function_keeps_its_indent():
    words = tokenizer._built(word_kinds.made("llama2"), (2,), None)
    head, body = "def add(a, b):", "\n    return a + b\n"
    ids = words.encode(head + body)[len(words.encode(head)) :]
    assert words.decode(ids, before=words.encode(head)) == body


def test_a_character_split_between_prompt_and_rollout():
    words = tokenizer._built(word_kinds.made("byte_level"), (2,), None)
    ids = words.encode("aжb")  # the letter was in no text that it was trained on
    assert len(ids) == 4 and words.decode(ids[-2:], before=ids[:-2]) == "жb"


@pytest.mark.parametrize("name", ["byte_level", "llama2", "gemma", "metaspace_first", "word_piece"])
def test_pieces_of_a_stream_are_the_whole_text(name):
    words, dice = tokenizer._built(word_kinds.made(name), (2,), None), np.random.default_rng(3)
    for _ in range(40):
        before, ids = (dice.integers(3, words.vocab_size, size) for size in (4, 14))
        running = RunningText(words.decode, Sampling(), before, words.settled)
        told = [running.more(ids[:end].tolist()) for end in range(1, 14)]
        assert "".join(told) + running.rest(ids.tolist(), Finish.LENGTH)[0] == rest(words, before, ids)


def test_a_long_prompt_costs_nothing():
    words = tokenizer._built(word_kinds.made("llama2"), (2,), None)
    prompt = np.resize(words.encode("the cat and the hat"), 100_000)
    begun = time.process_time()
    for _ in range(200):
        words.decode([300, 301], before=prompt)
    assert time.process_time() - begun < 1.0  # decoding all of it takes 0.02 s each


def test_a_broken_byte_behind_a_stop_string_does_not_hide_it():
    """With 8 tokens a dispatch as with 1: the bytes of 你, and one that breaks the run of bytes."""
    words = tokenizer._built(word_kinds.made("llama2"), (2,), None)
    byte = words.model.token_to_id("<0x00>")
    ids = np.array([byte + one for one in (*"你".encode(), 0xE5)], np.int32)
    assert words.decode(ids) == "\ufffd" * 4 and words.decode(ids[:3]) == "你"

    class Four:
        turn, request = 0, type("R", (), {"sampling": Sampling(stop_strings=("你",)), "prompt": type("P", (), {})})
        column = staticmethod(lambda name: ids)

    Four.request.prompt.tokens = np.array(words.encode("a"), np.int32)
    assert SequenceState.stopped_at(Four, words.decode, 0) == 3
