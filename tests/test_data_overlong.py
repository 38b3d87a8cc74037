"""Prompts over the limit: refused, dropped or cut at the left, each counted and named."""

from __future__ import annotations

import numpy as np
import pytest
from refusals import refused

from jaxrl_post.data import prompts
from jaxrl_post.data.prompts import Overlong
from jaxrl_post.data.tokenizer import characters

LETTERS = characters("0123456789+=")
ROWS = [
    {"id": str(n), "prompt": text, "answer": "", "source": "", "where": f"f.jsonl, line {n}"}
    for n, text in enumerate(("1+1=", "123456789+1=", "2=", "9876543210" * 9 + "7="), start=1)
]


def tokenised(mode: str, limit: int = 5):
    found = Overlong(mode=mode)
    return prompts.tokenised(ROWS, LETTERS, chat=None, limit=limit, overlong=found), found


def test_they_are_refused_by_default():
    with pytest.raises(
        ValueError, match=r"f.jsonl, line 2 \(id '2'\): the prompt has 12 tokens; it must have 1 to 5, .*overlong"
    ):
        tokenised("refuse")
    refused("the prompt has 12 tokens", prompts.tokenised, ROWS[1:2], LETTERS, chat=None, limit=5)


def test_they_are_dropped_and_counted():
    kept, found = tokenised("drop")
    assert [prompt.id for prompt in kept] == ["1", "3"] and len(found.places) == 2
    assert found.words("data.train", "f.jsonl", 5) == (
        "data.train=f.jsonl: 2 prompts have more than 5 tokens and are dropped (data.overlong='drop'); the first is f.jsonl, "
        "line 2 (id '2')"
    )
    assert tokenised("drop", limit=99)[1].words("data.train", "f.jsonl", 99) == ""


@pytest.mark.parametrize("limit", [1, 5, 11])
def test_they_are_cut_at_the_left(limit):
    """Also one with more characters than its tokens can have, which is never tokenised whole."""
    kept, found = tokenised("cut", limit)
    for prompt, row in zip(kept, ROWS, strict=True):
        whole = LETTERS.encode(row["prompt"])
        np.testing.assert_array_equal(prompt.tokens, whole[-limit:])
    assert len(found.places) == sum(len(row["prompt"]) > limit for row in ROWS)
    assert len(ROWS[3]["prompt"]) > limit * LETTERS.longest


def test_one_cut_prompt_is_told_in_the_singular():
    found = Overlong(mode="cut", places=["a.jsonl, line 7"])
    assert found.words("eval.data", "a.jsonl", 9) == (
        "eval.data=a.jsonl: 1 prompt has more than 9 tokens and is cut to the last tokens (data.overlong='cut'); the first is "
        "a.jsonl, line 7"
    )


@pytest.mark.parametrize("mode", ["refuse", "drop", "cut"])
def test_an_empty_prompt_is_refused_in_every_mode(mode):
    with pytest.raises(ValueError, match="the prompt has 0 tokens"):
        prompts.tokenised([ROWS[0] | {"prompt": ""}], LETTERS, chat=None, limit=5, overlong=Overlong(mode=mode))
