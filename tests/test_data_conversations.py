"""Which tokens of a conversation are trained on: those of transformers' own mask, for five templates with marks."""

from __future__ import annotations

import json

import mask_arms
import pytest
from mask_arms import say
from refusals import refused

from jaxrl_post.data import supervised, tokenizer
from jaxrl_post.data.chat import Chat
from jaxrl_post.data.columns import Columns

WANTED = json.loads(mask_arms.GOLDENS.read_text())


@pytest.fixture(scope="module")
def words(tmp_path_factory):
    return tokenizer.load(mask_arms.train(tmp_path_factory.mktemp("words")))


@pytest.fixture
def chat(request):
    made = Chat(template=request.param, tokens=mask_arms.TOKENS)
    yield made
    made.close()


def read(*talks, **columns):
    return [
        supervised.conversation_row(f"f.jsonl, line {i}", {"messages": list(talk)}, Columns(**columns))
        for i, talk in enumerate(talks)
    ]


@pytest.mark.parametrize("name, chat", mask_arms.TEMPLATES.items(), indirect=["chat"])
def test_tokens_and_masks_are_those_of_transformers(name, chat, words):
    found = [supervised.masked(talk, words, chat, 999) for talk in mask_arms.CONVERSATIONS]
    assert [[ids, list(map(int, mask))] for ids, mask in found] == WANTED["masks"][name]
    assert all(0 < sum(mask) < len(mask) for _, mask in found)


@pytest.mark.parametrize("chat", [mask_arms.HEADERS], indirect=True)
def test_a_conversation_is_cut_into_prompt_turns_and_what_lies_between(chat, words):
    prompts, taught = supervised.tokenised_conversations(
        read(*mask_arms.CONVERSATIONS), words, chat=chat, limit=99, most=99, where="f"
    )
    for prompt, (ids, mask) in zip(prompts, WANTED["masks"]["headers"], strict=True):
        first, last = mask.index(1), len(mask) - mask[::-1].index(1)
        one = taught[prompt.id]
        assert prompt.tokens.tolist() == ids[:first] and one.tokens == ids[first:last]
        assert one.trained == list(map(bool, mask[first:last])) and one.trained[0] and one.trained[-1]
    assert [sum(not kept for kept in taught[prompt.id].trained) > 0 for prompt in prompts] == [False, True, True]
    assert prompts[1].extra["messages"][-1]["content"] == "thanks"


@pytest.mark.parametrize("chat", ["{% generation %}{{ messages[0].content }}{% endgeneration %}"], indirect=True)
def test_a_first_token_has_nothing_before_it(chat, words):
    (prompt,), taught = supervised.tokenised_conversations(
        read([say("assistant", "numbers add")]), words, chat=chat, limit=9, most=99, where="f"
    )
    whole = words.encode("numbers add", special=False)
    assert prompt.tokens.tolist() == whole[:1] and taught[prompt.id].tokens == whole[1:]


MACRO = "{% macro say() %}b{% generation %}a{% endgeneration %}{% endmacro %}{{ messages[0].content }}{{ 'x' ~ say() }}"


@pytest.mark.parametrize(
    "chat, row, why",
    [
        ("{{ messages[0].content }}", {"messages": [say("user", "a")]}, "no {% generation %} marks"),
        (mask_arms.CHATML, {"messages": [say("user", "a")]}, "no token of the conversation lies in a turn of"),
        (mask_arms.CHATML, {"messages": [say("user", "a"), say("assistant", "1 " * 30)]}, "more than sampling.max_tok"),
        (mask_arms.CHATML, {"prompt": "a", "completion": "b"}, "line 1: there is no column 'messages'"),
        (mask_arms.CHATML, {"chosen": [], "rejected": []}, "line 1: is a row of preferences"),
        (mask_arms.CHATML, {"messages": "a"}, "column 'messages': must be a list of messages, got 'a'"),
        (MACRO, {"messages": [say("assistant", "zz")]}, "a generation block lies inside of a macro"),
    ],
    indirect=["chat"],
)
def test_what_is_refused_with_one_sentence(chat, row, why, words):
    with pytest.raises(ValueError, match=why) as caught:
        rows = [supervised.conversation_row("f.jsonl, line 1", row, Columns())]
        supervised.tokenised_conversations(rows, words, chat=chat, limit=20, most=20, where="f")
    assert "\n" not in str(caught.value)


def test_without_a_template_or_places_there_is_no_mask(words):
    talk = mask_arms.CONVERSATIONS[0]
    refused("no chat template", supervised.masked, talk, words, None, 99)
    pieces = (b"<unk>", b"<s>", b"</s>", *(b"<0x%02X>" % i for i in range(256)))
    bytes_ = tokenizer.Llama2cTokenizer(pieces=pieces, scores=(0.0,) * 259, ids={p: i for i, p in enumerate(pieces)})
    with pytest.raises(ValueError, match=r"llama2\.c vocabulary does not say where"):
        supervised.masked(talk, bytes_, Chat(template=mask_arms.CHATML), 99)
