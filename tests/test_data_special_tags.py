"""Special tokens that graders see or do not see."""

from __future__ import annotations

import pytest
import tokenizers

from jaxrl_post.data import special_tags, tokenizer


def made(*special):
    """A tokenizer of words, with </s> (id 0) as its end and further special tokens from id 3 on."""
    words = {"</s>": 0, "a": 1, "b": 2} | {name: 3 + place for place, name in enumerate(special)}
    model = tokenizers.Tokenizer(tokenizers.models.WordLevel(words))
    model.pre_tokenizer, model.decoder = tokenizers.pre_tokenizers.WhitespaceSplit(), tokenizers.decoders.Fuse()
    model.add_special_tokens(["</s>", *special])
    return tokenizer._built(model, (0,), None)


THINKING = made("<think>", "</think>", "<|im_end|>")


@pytest.mark.parametrize(
    "ids, ends, hidden, shown",
    [
        ([3, 1, 4, 2, 0], (0,), "ab", "<think>a</think>b"),
        ([3, 1, 4, 2, 5], (0, 5), "ab", "<think>a</think>b"),  # by a stop id
        ([3, 1, 4, 2], (0, 2), "ab", "<think>a</think>b"),  # by a stop id that is text
        ([3, 1, 5, 2, 4], (0, 5), "ab", "<think>a<|im_end|>b</think>"),
        ([0], (0,), "", ""),
    ],
)
def test_the_text_of_a_rollout_for_graders(ids, ends, hidden, shown):
    assert special_tags.graded(THINKING, ends, skip=True)(ids, before=[1]) == hidden
    decode = special_tags.graded(THINKING, ends, skip=False)
    assert decode(ids, before=[1]) == shown
    assert decode([1, 3, 0]) == "a<think></s>", "a prompt keeps all its tokens"


@pytest.mark.parametrize(
    "special, prompt, tags",
    [
        (("<think>", "</think>"), [1], ["<think>"]),
        (("<think>", "</think>"), [1, 3], ["<think>"]),  # the template opens it
        (("<think>", "</think>"), [1, 3, 4], []),  # its own mark
        (("[THINK]", "[/THINK]", "<tool_call>", "</tool_call>"), [1], ["<tool_call>", "[THINK]"]),
        (("<|begin_of_thought|>", "<|end_of_thought|>"), [1], ["<|begin_of_thought|>"]),
        (("<|start_header_id|>", "<|end_header_id|>"), [3, 1, 4], []),
        (("<s>", "<pad>", "<|im_start|>", "<|im_end|>"), [1], []),  # no pair, and </s> is an end
        ((), [1], []),
    ],
)
def test_tags_that_no_grader_sees(special, prompt, tags):
    assert special_tags.hidden(made(*special), prompt) == tags
