"""What supervised rows are trained on: each row's tokens are spelt out by hand, as TRL would cut them."""

from __future__ import annotations

import json

import mask_arms
import pytest
from mask_arms import say
from refusals import refused

from jaxrl_post.data import preferences, supervised, tokenizer
from jaxrl_post.data.chat import Chat
from jaxrl_post.data.columns import Columns
from jaxrl_post.data.prompts import read
from jaxrl_post.data.tokenizer import characters

WORDS = characters("abcdefghijklmnopqrstuvwxyz0123456789+=?<>/ .\n", eos="!")
# As Qwen's: a turn ends with the end token and a line feed, and the head of an assistant's turn asks for one.
TEMPLATE = "{% for m in messages %}<{{ m.role }}>{{ m.content }}!\n{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"


class Merging:
    """A tokenizer that knows "ab" as one token, 200: the tokens of a prompt may reach into its answer."""

    eos_ids, longest = (0,), 2

    def encode(self, text, special=True):
        out = [1] if special else []
        while text:
            size = 2 if text.startswith("ab") else 1
            out.append(200 if size == 2 else ord(text[0]))
            text = text[size:]
        return out

    def decode(self, ids, skip_special=True, before=()):
        return "".join("ab" if i == 200 else chr(i) for i in ids if i > 1)


@pytest.fixture
def chat():
    made = Chat(template=TEMPLATE)
    yield made
    made.close()


def ids(text):
    """Token ids of a text in which ! is the end token."""
    return [WORDS.eos_ids[0] if letter == "!" else WORDS.encode(letter, special=False)[0] for letter in text]


def written(folder, *rows):
    (folder / "f.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder / "f.jsonl"


def both(path, words=WORDS, *, template=None, most=20, limit=60, **columns):
    """Prompt and trained tokens of each row of a file."""
    rows = read(path, Columns(**columns), supervised.row)
    prompts, taught = supervised.tokenised(rows, words, chat=template, limit=limit, most=most, where=str(path))
    return [(prompt.tokens.tolist(), taught[prompt.id]) for prompt in prompts], prompts


def test_prompt_and_completion_as_texts(tmp_path):
    path = written(
        tmp_path,
        {"prompt": "1+1=", "completion": "2"},
        {"prompt": "who?", "completion": " me", "answer": "you", "level": 3},
        {"prompt": "1+1=", "completion": "3"},
    )
    cut, prompts = both(path)
    assert cut == [(ids("1+1="), ids("2!")), (ids("who?"), ids(" me!")), (ids("1+1="), ids("3!"))]
    assert [prompt.answer for prompt in prompts] == ["2", "you", "3"] and len({prompt.id for prompt in prompts}) == 3
    assert prompts[1].extra == {"completion": " me", "level": 3} and prompts[0].lacks == ""


def test_own_column_names_and_a_chat_template_around_texts(tmp_path, chat):
    path = written(tmp_path, {"extra_info": {"question": "q?", "reply": "r", "level": 1}})
    named = {"prompt": "extra_info.question", "completion": "extra_info.reply"}
    assert both(path, named=named, format="trl")[0] == [(ids("q?"), ids("r!"))]
    cut = both(path, template=chat, named=named, format="trl", chat=True)[0]
    assert cut == [(ids("<user>q?!\n<assistant>"), ids("r!"))]


def test_messages_are_trained_on_the_last_turn_behind_the_generation_prompt(tmp_path, chat):
    talk = [say("user", "a"), say("assistant", "b"), say("user", "c"), say("assistant", "d")]
    path = written(tmp_path, {"messages": talk}, {"messages": [*talk[:3], say("assistant", "e")]})
    cut, prompts = both(path, template=chat)
    head = "<user>a!\n<assistant>b!\n<user>c!\n<assistant>"
    assert cut == [(ids(head), ids("d!")), (ids(head), ids("e!"))]
    assert prompts[0].extra["messages"] == talk and prompts[0].answer == "d" and prompts[0].id != prompts[1].id


def test_prompt_and_completion_as_messages(tmp_path, chat):
    asked = [say("system", "s"), say("user", "q")]
    path = written(
        tmp_path,
        {"prompt": asked, "completion": [say("assistant", "r")]},
        {"prompt": asked, "completion": "r", "id": "x"},
    )
    assert both(path, template=chat)[0] == [(ids("<system>s!\n<user>q!\n<assistant>"), ids("r!"))] * 2


def test_text_is_trained_on_as_a_whole(tmp_path):
    """The first token has nothing before it, so that no next-token loss trains it. An end token is added once."""
    path = written(tmp_path, {"text": "abc"}, {"text": "ab!"}, {"text": "a b", "id": 7})
    assert both(path)[0] == [([ids("a")[0]], ids("bc!")), ([ids("a")[0]], ids("b!")), ([ids("a")[0]], ids(" b!"))]
    cut, prompts = both(path, Merging())
    assert cut[0] == ([1], [200, ord("c"), 0]) and prompts[0].lacks  # a BOS goes before it


def test_the_solution_and_the_ground_truth_stay(tmp_path):
    path = written(tmp_path, {"prompt": "1=", "answer": "2", "solution": "so 2"}, {"prompt": "2=", "answer": 2})
    assert both(path)[0] == [(ids("1="), ids("so 2!")), (ids("2="), ids("2!"))]


def test_tokens_are_those_of_prompt_and_answer_together(tmp_path):
    assert both(written(tmp_path, {"prompt": "x", "completion": "ab"}), Merging())[0] == [([1, ord("x")], [200, 0])]
    with pytest.raises(ValueError, match=r"f.jsonl, line 1 .*: a token reaches from the prompt into the completion"):
        both(written(tmp_path, {"prompt": "xa", "completion": "b"}), Merging())


def test_a_template_without_an_end_token_gets_one_and_one_that_goes_on_is_refused(tmp_path):
    row = {"messages": [say("user", "a"), say("assistant", "b")]}
    plain = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
    for template, answer in ((plain, "b!"), (plain.replace("{{ m.content }}", "{{ m.content }}!more"), None)):
        chat = Chat(template=template)
        if answer:
            assert both(written(tmp_path, row), template=chat)[0] == [(ids("<user>a<assistant>"), ids(answer))]
        else:
            with pytest.raises(
                ValueError, match="line 1 .*: the chat template ends the completion and goes on writing"
            ):
                both(written(tmp_path, row), template=chat)
        chat.close()


@pytest.mark.parametrize("name", mask_arms.HEADS)
def test_an_answer_begins_where_its_tokens_leave_the_prompt_as_in_trl(name, tmp_path):
    """Tokens and cuts are those of transformers and TRL (scripts/assistant_masks.py)."""
    words = tokenizer.load(mask_arms.train(tmp_path))
    chat, left = Chat(template=mask_arms.HEADS[name], tokens=mask_arms.TOKENS, file="words/t.jinja"), {}
    rows = [{"messages": talk} for talk in mask_arms.answers()]
    read = [supervised.row(f"f, line {number}", row, Columns()) for number, row in enumerate(rows)]
    fits = dict(chat=chat, limit=200, most=200, where="f")
    prompts, taught = supervised.tokenised(read, words, **fits, left=left)
    for prompt, (whole, cut) in zip(prompts, json.loads(mask_arms.GOLDENS.read_text())["cuts"][name], strict=True):
        answer = taught[prompt.id]
        assert prompt.tokens.tolist() == whole[:cut] and [*whole[:cut], *answer] in (
            whole[: cut + len(answer)],
            [*whole, 1],
        )
    (pair,), sides = preferences.tokenised(
        [preferences.row("f, line 1", _pair(mask_arms.answers()[0]), Columns())], words, **fits
    )
    assert pair.tokens.tolist() == prompts[0].tokens.tolist() and sides[pair.id][0] == taught[prompts[0].id]
    wanted = {"opens": "<think>\n", "merges": "um", "empties": "<think>\n\n</think>\n\n"}.get(name)
    assert set(left.values()) == ({wanted} if wanted else set()), left
    said = supervised.said_of(left, "data.train", "f", len(rows), chat)
    assert len(said) == bool(wanted) and all("in 5 of 5 rows" in line and "words/t.jinja" in line for line in said)
    chat.close()


def _pair(talk):
    *prompt, answer = talk
    return {"prompt": prompt, "chosen": [answer], "rejected": [answer | {"content": "No."}]}


@pytest.mark.parametrize(
    "template, why",
    [
        # the date of a system message only where nothing follows; another head in front of the messages
        ("{{ messages | length }}" + TEMPLATE, "when a completion follows: at character 0 it writes '1<user>a"),
        (
            "{% if add_generation_prompt %}g{% endif %}" + TEMPLATE,
            "when the head of an assistant's turn follows: at character 0 it writes '<user>a",
        ),
    ],
)
def test_a_template_that_writes_messages_in_another_way_is_refused_by_name_and_place(tmp_path, template, why):
    chat = Chat(template=template, file="words/t.jinja")
    row = {"messages": [say("user", "a" * 60), say("assistant", "b")]}
    with pytest.raises(
        ValueError, match="line 1 .*: the chat template words/t.jinja writes the prompt in another"
    ) as caught:
        both(written(tmp_path, row), template=chat)
    assert why in str(caught.value) and "make the text of a message depend on no later one" in str(caught.value)
    chat.close()


def test_a_prompt_of_another_end_obeys_the_limit(tmp_path):
    chat = Chat(template=TEMPLATE.replace("<assistant>{% endif", "<assistant>?{% endif"))
    row = {"messages": [say("user", "a" * 30), say("assistant", "b")]}
    assert both(written(tmp_path, row), template=chat)[0] == [(ids(f"<user>{'a' * 30}!\n<assistant>"), ids("b!"))]
    with pytest.raises(ValueError, match="line 1 .*: the prompt has 49 tokens; it may have 48"):
        both(written(tmp_path, row), template=chat, limit=48)
    chat.close()


@pytest.mark.parametrize(
    "row, words",
    [
        ({"prompt": "1+1=", "completion": ""}, r"line 2 \(id .*: the demonstration is empty: only an end token"),
        ({"prompt": "1+1=", "completion": "  "}, "the demonstration is empty"),
        ({"prompt": "1+1=", "completion": "!"}, "the demonstration is empty"),
        ({"messages": [say("user", "a"), say("assistant", "")]}, "line 2 .*the demonstration is empty"),
        ({"messages": [say("user", "a"), say("assistant", None)]}, "line 2"),
        ({"text": "a"}, "the demonstration is empty"),
        ({"prompt": "1", "answer": ""}, "column 'answer' is empty, and there is no column 'completion', 'messages'"),
        ({"prompt": "1", "answer": "1", "solution": " "}, "the demonstration is empty"),
        ({"prompt": "1"}, "line 2: there is no column 'reward_model.ground_truth'"),
        (
            {"prompt": "1", "chosen": "a", "rejected": "b"},
            "line 2: is a row of preferences, with 'chosen' and 'rejected'",
        ),
        ({"chosen": [say("user", "a")], "rejected": []}, "is a row of preferences, with 'chosen' and 'rejected'"),
        ({"prompt": "1", "completion": "2", "label": True}, "with 'completion' and a 'label' of true or false"),
        (
            {"messages": [say("user", "a")]},
            "line 2, column 'messages': its last message is of 'user', not of 'assistant'",
        ),
        ({"messages": [say("assistant", "a")]}, "holds a completion and no prompt"),
        ({"messages": "a"}, "column 'messages': must be a list of messages, got 'a'"),
        ({"messages": []}, "must be a list of messages"),
        ({"prompt": "1", "completion": [say("assistant", "a")]}, "is a message, but the prompt is a text"),
        ({"prompt": [say("user", "a")], "completion": [say("user", "a")]}, "one message of the assistant"),
        ({"prompt": "1", "completion": 3}, "line 2, column 'completion': must be a text or one message"),
        ({"completion": "2"}, "line 2: there is no column 'prompt'"),
        ({"prompt": "1", "completion": "2" * 20}, "has 21 tokens with its end, more than sampling.max_tokens=20"),
        ({"prompt": "1", "completion": "2" * 2000}, "line 2 .*: the row has 2001 characters"),
        ({"prompt": "1", "completion": "Z"}, "line 2 .*: the tokenizer has no token for 'Z'"),
        ({"text": 3}, "line 2, column 'text': must be a text"),
        ([1], "line 2: must be an object, got a list"),
    ],
)
def test_what_is_refused_with_file_and_line(tmp_path, chat, row, words):
    path = written(tmp_path, {"prompt": "9", "completion": "9"}, row)
    caught = refused(words, both, path, template=chat)
    assert "f.jsonl" in caught


def test_text_takes_no_template_and_asks_nothing(tmp_path):
    path = written(tmp_path, {"text": "abc"})
    with pytest.raises(ValueError, match="line 1, column 'text': is trained on as it is: data.template and data.chat"):
        read(path, Columns(template="{prompt}"), supervised.row)
    with pytest.raises(ValueError, match="line 1: a row of 'text' asks nothing that could be evaluated"):
        supervised.questions(read(path, Columns(), supervised.row))
    (asked,) = supervised.questions(
        read(written(tmp_path, {"prompt": "1", "completion": "2"}), Columns(), supervised.row)
    )
    assert asked["prompt"] == "1" and asked["answer"] == "2" and "demonstration" not in asked


def test_messages_need_a_template(tmp_path):
    path = written(tmp_path, {"messages": [say("user", "a"), say("assistant", "b")]})
    refused("line 1 .*: the completion is a message, but the tokenizer has no chat template", both, path)
