"""What ends a rollout: end tokens of a model's files, and stop strings that are special tokens."""

from __future__ import annotations

import pytest
import word_kinds
from refusals import refused

from jaxrl_post.data import ends, tokenizer
from jaxrl_post.ring.types import MOST_ENDS, Sampling

WORDS = tokenizer._built(word_kinds.made("byte_level"), (), None)  # <unk> 0, <s> 1, </s> 2, <think> 3


@pytest.mark.parametrize(
    "strings, eos, stops",
    [
        (("</s>",), (), (2,)),
        (("</s>", "cat", "<think>"), (), (2, 3)),
        (("</s>",), (2,), ()),  # an end of the tokenizer stays one
        (("cat", "s>"), (), ()),
        (("</s>", "</s>"), (), (2,)),
    ],
)
def test_a_stop_string_that_is_a_special_token_is_a_stop_id(strings, eos, stops):
    law = ends.with_special_stops(Sampling(stop_strings=strings, eos_ids=eos), WORDS)
    assert law.stop_ids == stops and law.stop_strings == strings and law.eos_ids == eos


@pytest.mark.parametrize("text", ["</s>\n", "\n\n</s>", "a<think>b"])
def test_a_special_token_beside_other_text_is_refused_with_its_id(text):
    with pytest.raises(ValueError, match=r"holds the special token '<.*>', which no text shows; name [23] in stop_ids"):
        ends.with_special_stops(Sampling(stop_strings=(text,)), WORDS)


def test_too_many_ends_are_refused():
    law = Sampling(stop_strings=("</s>",), eos_ids=tuple(range(3, 3 + MOST_ENDS)))
    refused(f"at most {MOST_ENDS} together", ends.with_special_stops, law, WORDS)


@pytest.mark.parametrize("text", ["", "\ufffd", "a\ufffd"])
def test_an_empty_or_broken_stop_string_is_refused_everywhere(text):
    refused("at least 1 character, without U.FFFD", Sampling, stop_strings=("a", text))
