"""Token-exact conversations: 1,000 of them against the template's text tokenised once, for four templates."""

from __future__ import annotations

import json

import numpy as np
import pytest
from mask_arms import say

from jaxrl_post.data import tokenizer
from jaxrl_post.data.chat import Chat
from jaxrl_post.data.turns import Wording

tokenizers = pytest.importorskip("tokenizers")

HERMES = """{%- if tools %}{{- '<|im_start|>system\\n' }}
{%- for tool in tools %}{{- tool | tojson }}{%- endfor %}{{- '<|im_end|>\\n' }}{%- endif %}
{%- for m in messages %}
{%- if m.role == 'tool' %}
{%- if loop.index0 == 0 or messages[loop.index0 - 1].role != 'tool' %}{{- '<|im_start|>user' }}{%- endif %}
{{- '\\n<tool_response>\\n' + m.content + '\\n</tool_response>' }}
{%- if loop.last or messages[loop.index0 + 1].role != 'tool' %}{{- '<|im_end|>\\n' }}{%- endif %}
{%- else %}{{- '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>\\n' }}{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"""
LLAMA3 = """{{- bos_token }}{%- for m in messages %}
{{- '<|start_header_id|>' + ('ipython' if m.role == 'tool' else m.role) + '<|end_header_id|>\\n\\n' + m.content | trim + '<|eot_id|>' }}
{%- endfor %}{%- if add_generation_prompt %}{{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}{%- endif %}"""
MISTRAL = """{{- bos_token }}{%- for m in messages %}
{%- if m.role == 'user' %}{{- '[INST]' + m.content + '[/INST]' }}
{%- elif m.role == 'tool' %}{{- '[TOOL_RESULTS]' + {'content': m.content} | tojson + '[/TOOL_RESULTS]' }}
{%- else %}{{- m.content + eos_token }}{%- endif %}{%- endfor %}"""
PLAIN = """{%- for m in messages %}{{- m.content + (eos_token if m.role == 'assistant' else '>') }}{%- endfor %}"""
TEMPLATES = {  # the template, and the token that ends a turn
    "hermes": (HERMES, "<|im_end|>"),
    "llama3": (LLAMA3, "<|eot_id|>"),
    "mistral": (MISTRAL, "</s>"),
    "plain": (PLAIN, "</s>"),
}
SPECIAL = [
    *("<s>", "</s>", "<|im_start|>", "<|im_end|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"),
    *("[INST]", "[/INST]", "[TOOL_RESULTS]", "[/TOOL_RESULTS]"),
]
WORDS = [
    *("the", "sum", "of", "12", "and", "7", "is", "nineteen", "so", "I", "call", "a", "tool;", "result:", "3.5"),
    *("naïve", "café", "日本", '{"a":', "[1,", "2]}", "\n\n", "", "ok"),
]


# How Llama 3 and Qwen 2 split a text into words. GPT-2 cuts a run of line breaks before a word in two.
SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+"
    r"|\s+(?!\S)|\s+"
)


def bpe(end: str, gpt2: bool = False) -> tokenizer.JsonTokenizer:
    """Returns a byte-level BPE that was trained on a few words, with the special tokens of all templates."""
    model = tokenizers.Tokenizer(tokenizers.models.BPE())
    split = tokenizers.pre_tokenizers.Split(tokenizers.Regex(SPLIT), "isolated")
    letters = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=gpt2)
    model.pre_tokenizer = letters if gpt2 else tokenizers.pre_tokenizers.Sequence([split, letters])
    model.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=SPECIAL,
        initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    model.train_from_iterator([" ".join(WORDS)] * 20, trainer)
    ids = tuple(model.token_to_id(name) for name in SPECIAL)
    return tokenizer.JsonTokenizer(
        model=model,
        eos_ids=(model.token_to_id(end),),
        bos_id=model.token_to_id("<s>"),
        special_ids=ids,
        vocab_size=model.get_vocab_size(),
        longest=64,
    )


def text(noise: np.random.Generator) -> str:
    """Returns a few words. A template that trims would change spaces at the ends, so there are none."""
    return " ".join(noise.choice(WORDS, noise.integers(1, 12))).strip() or "x"


def conversation(noise: np.random.Generator) -> list[dict]:
    out = [{"role": "user", "content": text(noise)}]
    for _ in range(int(noise.integers(1, 5))):
        out.append({"role": "assistant", "content": text(noise)})
        many = 1 + int(noise.random() < 0.3)
        role = "tool" if noise.random() < 0.6 else "user"
        out += [{"role": role, "content": text(noise)} for _ in range(many if role == "tool" else 1)]
    return [*out, {"role": "assistant", "content": text(noise)}]


def appended(wording: Wording, messages: list[dict]) -> list[int]:
    """Returns the ids of a conversation turn by turn, as a rollout collects them, up to the end of its last turn."""
    words, end = wording.words, wording.words.eos_ids[0]
    first = next(i for i, m in enumerate(messages) if m["role"] == "assistant")
    ids = words.encode(wording.chat.render(messages[:first]), special=False)
    turns = [i for i, m in enumerate(messages) if m["role"] == "assistant"]
    for at, following in zip(turns, [*turns[1:], len(messages)]):
        ids += [*words.encode(messages[at]["content"], special=False), end]
        if messages[at + 1 : following]:
            ids += wording.observed(messages[:at], messages[at + 1 : following], end)
    return ids


@pytest.mark.parametrize("name", TEMPLATES)
def test_250_conversations_equal_the_text_tokenised_once(name):
    template, end = TEMPLATES[name]
    tools = ({"type": "function", "function": {"name": "f", "parameters": {}}},)
    chat = Chat(template=template, tokens={"bos_token": "<s>", "eos_token": "</s>"}, arguments={"tools": tools})
    wording, noise = Wording(chat, bpe(end)), np.random.default_rng(0)
    for _ in range(250):
        messages = conversation(noise)
        once = wording.whole(messages)
        mine = appended(wording, messages)
        assert once[: len(mine)] == mine
        assert len(once) - len(mine) <= 1, "only the line break behind the last turn is missing"
    chat.close()


def test_where_the_tokenizer_is_not_stable_the_text_is_the_same():
    """GPT-2's splitting joins the head of a turn with its first word. Then ids differ from the text tokenised once, from
    the head of the prompt on, and the text does not."""
    template, end = TEMPLATES["llama3"]
    chat = Chat(template=template, tokens={"bos_token": "<s>"})
    wording, noise, apart = Wording(chat, bpe(end, gpt2=True)), np.random.default_rng(0), 0
    for _ in range(20):
        messages = conversation(noise)
        once, mine = wording.whole(messages), appended(wording, messages)
        words = wording.words
        assert words.decode(once, skip_special=False) == words.decode(mine, skip_special=False)
        apart += once != mine
    assert apart >= 10
    chat.close()


def test_sampled_ids_stay_where_the_tokenizer_would_give_others():
    """A policy may spell a word letter by letter. Its ids stay, and they differ from the text tokenised once."""
    template, end = TEMPLATES["hermes"]
    wording = Wording(Chat(template=template, tokens={}), bpe(end))
    words, stop = wording.words, wording.words.eos_ids[0]
    letters = [i for letter in "nineteen" for i in words.encode(letter, special=False)]
    assert words.decode(letters) == "nineteen" and words.encode("nineteen", special=False) != letters
    said = wording.said(np.array([*letters, stop]))
    assert said == "nineteen"
    before, seen = [{"role": "user", "content": "3"}], [{"role": "tool", "content": "4"}]
    ids = [*letters, stop, *wording.observed(before, seen, stop)]
    once = words.encode(wording.chat.render([*before, {"role": "assistant", "content": said}, *seen]), special=False)
    first = words.encode(wording.chat.render(before), special=False)
    assert words.decode([*first, *ids], skip_special=False) == words.decode(once, skip_special=False)
    assert [*first, *ids] != once and ids[: len(letters)] == letters and ids[len(letters)] == stop


def test_another_end_of_turn_is_not_repeated_or_lost():
    """Where the policy ends a turn with another token than the template's, the template's end is observed."""
    template, end = TEMPLATES["hermes"]
    wording = Wording(Chat(template=template, tokens={}), bpe(end))
    words = wording.words
    other = words.model.token_to_id("</s>")
    seen = [{"role": "user", "content": "4"}]
    plain = wording.observed([], seen, words.eos_ids[0])
    assert wording.observed([], seen, other) == [words.eos_ids[0], *plain]


def test_a_template_that_drops_the_turn_is_refused():
    chat = Chat(template="{% for m in messages %}{% if m.role == 'user' %}{{ m.content }}{% endif %}{% endfor %}")
    with pytest.raises(ValueError, match="leaves out what the assistant said"):
        Wording(chat, bpe("</s>")).observed([], [{"role": "user", "content": "x"}], 0)


def test_a_turn_that_nothing_follows_is_refused():
    """A conversation would else go on with the same tokens for ever."""
    chat = Chat(template=PLAIN, tokens={"eos_token": "</s>"})
    with pytest.raises(ValueError, match="nothing follows the turn"):
        Wording(chat, bpe("</s>")).observed([{"role": "user", "content": "x"}], [], 1)


def test_tools_reach_the_template():
    template, _ = TEMPLATES["hermes"]
    tools = ({"type": "function", "function": {"name": "adder", "parameters": {}}},)
    shown = Chat(template=template, arguments={"tools": tools}).render([{"role": "user", "content": "x"}])
    assert json.dumps(tools[0]) in shown
    assert "adder" not in Chat(template=template).render([{"role": "user", "content": "x"}])


@pytest.mark.parametrize("name", TEMPLATES)
def test_what_follows_a_begun_turn_equals_the_text_tokenised_once(name):
    template, end = TEMPLATES[name]
    wording = Wording(Chat(template=template, tokens={"bos_token": "<s>", "eos_token": "</s>"}), bpe(end))
    asked, said, then = say("user", "1+1"), say("assistant", "It is 2."), say("user", "and?")
    before, words = [asked, say("assistant", "It is")], wording.words
    ids = [
        *words.encode(wording.chat.render(before), special=False),
        *words.encode(" 2.", special=False),
        words.eos_ids[0],
    ]
    ids += wording.observed(before, [then], words.eos_ids[0], begun=True)
    assert words.decode(ids, False) == wording.chat.render([asked, said, then])
    wording.chat.close()
