"""Rows as templates take them: tools, arguments, parts, prefills, nulls, and the one text that all uses of a template have.

The wanted texts are spelt out by hand; the show strangers compares with transformers.
"""

from __future__ import annotations

import datetime
import json

import pytest
from refusals import refused

from jaxrl_post.data import duplicates, preferences, prompts, supervised
from jaxrl_post.data.chat import Chat, load
from jaxrl_post.data.columns import Columns
from jaxrl_post.data.tokenizer import characters

WORDS = characters("".join(map(chr, range(32, 126))) + "\n", eos="~")
TEMPLATE = (
    "{% if tools %}T{{ tools | tojson }}{% endif %}{% for m in messages %}<{{ m.role[0] }}>{{ m.content or '' }}"
    "{% for call in m.tool_calls or [] %}@{{ call.function | tojson }}{% endfor %}~{% endfor %}"
    "{% if add_generation_prompt %}<a>{% if think is defined and not think %}-{% endif %}{% endif %}"
)
PARTS = (
    "{% for m in messages %}<{{ m.role[0] }}>{% for part in m.content %}{{ part.text | trim }};{% endfor %}~{% endfor %}"
    "{% if add_generation_prompt %}<a>{% endif %}"
)
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
SHOWN = 'T[{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}]'
ASK, SAY = {"role": "user", "content": "2+3?"}, {"role": "assistant", "content": "5"}
TOLD = {"tools": [TOOL], "chat_template_kwargs": {"think": False}}


@pytest.fixture(scope="module")
def chat():
    made = Chat(template=TEMPLATE)
    yield made
    made.close()


def texts(row, chat, /, **columns):
    """Returns the text of a row's prompt, as reinforcement learning shows it."""
    found = prompts.tokenised([Columns(**columns).row("F, line 1", row)], WORDS, chat=chat, limit=999)
    return WORDS.decode(found[0].tokens.tolist(), skip_special=False)


def test_tools_and_arguments_of_a_row_reach_the_template_in_every_use(chat):
    wanted = f"{SHOWN}<u>2+3?~<a>-"
    for told in (TOLD, {name: json.dumps(value) for name, value in TOLD.items()}):
        assert texts({"prompt": [ASK], "answer": "5"} | told, chat) == wanted
        fits = dict(chat=chat, limit=999, most=99, where="F")
        for row in (
            {"messages": [ASK, SAY]},
            {"prompt": [ASK], "completion": [SAY]},
            {"prompt": [ASK], "solution": "5"},
        ):
            one = supervised.row("F, line 1", row | told, Columns(format="trl"))
            found, taught = supervised.tokenised([one], WORDS, **fits)
            cut = "solution" not in row  # the head's "-" is not written in front of a message
            assert WORDS.decode(found[0].tokens.tolist(), False) == (wanted[:-1] if cut else wanted)
            assert WORDS.decode(taught[found[0].id], False) == "5~"
        pair = {"prompt": [ASK], "chosen": [SAY], "rejected": [SAY | {"content": "6"}], "tools": told["tools"]}
        found, pairs = preferences.tokenised([preferences.row("F, line 1", pair, Columns())], WORDS, **fits)
        assert WORDS.decode(found[0].tokens.tolist(), False) == wanted[:-1]
        assert [WORDS.decode(side) for side in pairs[found[0].id]] == ["5", "6"]


@pytest.mark.parametrize(
    "row,words",
    [
        ({"prompt": "2+3?", "tools": [TOOL]}, "the prompt is a text, and no chat template is given tools of the row"),
        ({"prompt": [ASK], "tools": "a hammer"}, "column 'tools': no JSON"),
        ({"prompt": [ASK], "tools": ["hammer"]}, "column 'tools': must be a list of JSON schemas"),
        ({"prompt": [ASK], "chat_template_kwargs": [1]}, "column 'chat_template_kwargs': must be an object, got"),
        (
            {"prompt": [ASK], "chat_template_kwargs": {"messages": []}},
            "'messages' is no argument of a chat template; leave it",
        ),
        ({"prompt": [{"role": "user"}]}, "column 'prompt\\[0\\]': must be an object with role and content"),
        ({"prompt": [ASK | {"content": [{"type": "image"}]}]}, "messages\\[0\\].content\\[0\\]=.* is no text part"),
        ({"prompt": [ASK | {"content": ["2+3?"]}]}, "messages\\[0\\].content\\[0\\]='2\\+3\\?' is no text part"),
        (
            {"prompt": [ASK | {"content": {"text": "x"}}]},
            "messages\\[0\\].content must be a text or a list of text parts",
        ),
        ({"prompt": "[{'role': 'user', 'content': '2+3?'}]"}, "is a text of messages that is no JSON list"),
        ({"prompt": json.dumps({"messages": [ASK]})}, "is a text of messages that is no JSON list"),
        ({"prompt": json.dumps(json.dumps([ASK]))}, "is a text of messages that is no JSON list"),
    ],
)
def test_what_is_no_such_thing_is_refused_by_file_and_line(row, words):
    with pytest.raises(ValueError, match=f"^data: F, line 1.*{words}"):
        Columns().row("F, line 1", row | {"answer": "5"})


def test_parts_are_joined_where_a_template_reads_none_and_stay_parts_where_it_does(chat):
    talk = [
        {
            "role": role,
            "content": [{"type": "text", "text": "How many "}, {"type": "text", "text": "wrens?", "image": None}],
        }
        for role in ("system", "user", "assistant", "user")
    ]
    assert (
        texts({"prompt": talk, "answer": ""}, chat) == "".join(f"<{role}>How many wrens?~" for role in "suau") + "<a>"
    )
    made = Chat(template=PARTS)
    assert (
        texts({"prompt": talk, "answer": ""}, made) == "".join(f"<{role}>How many;wrens?;~" for role in "suau") + "<a>"
    )
    assert made.render(talk[:3]) == "<s>How many;wrens?;~<u>How many;wrens?;~<a>How many;wrens?"  # continued
    made.close()
    assert (
        texts({"prompt": talk[:2], "answer": ""}, chat, template="{prompt}!")
        == "<s>How many wrens?~<u>How many wrens?!~<a>"
    )


def test_nulls_are_absent_keys_at_every_level(chat, tmp_path):
    pyarrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    rows = [
        {
            "prompt": [
                ASK,
                {"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "f", "arguments": given}}]},
                {"role": "tool", "content": "5"},
            ],
            "answer": "",
            "tools": [
                {
                    "type": "function",
                    "function": {"name": "f", "parameters": {"properties": {key: {"a": 1} for key in given}}},
                }
            ],
        }
        for given in ({"x": 1}, {"y": "z"})
    ]
    parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "r.parquet")
    (tmp_path / "r.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    ways = [prompts.read(tmp_path / f"r.{kind}") for kind in ("parquet", "jsonl")]
    ways += [[Columns().row("rows, row 1", row) for row in pyarrow.Table.from_pylist(rows).to_pylist()]]
    shown = [[prompts.rendered(chat, row) for row in way] for way in ways]
    tool = '{"type": "function", "function": {"name": "f", "parameters": {"properties": {"y": {"a": 1}}}}}'
    assert shown[0][1] == f'T[{tool}]<u>2+3?~<a>@{{"name": "f", "arguments": {{"y": "z"}}}}~<t>5~<a>'
    assert shown[0] == shown[1] == shown[2]


def test_a_begun_turn_of_the_assistant_is_continued(chat):
    begun = [ASK, {"role": "assistant", "content": "Let me add.\n<think>"}]
    assert texts({"prompt": begun, "answer": ""}, chat) == "<u>2+3?~<a>Let me add.\n<think>"
    assert chat.render(begun, continues=False) == "<u>2+3?~<a>Let me add.\n<think>~<a>"
    one = supervised.row("F, line 1", {"prompt": begun, "completion": [SAY]}, Columns())
    found, taught = supervised.tokenised([one], WORDS, chat=chat, limit=99, most=9, where="F")
    assert WORDS.decode(found[0].tokens.tolist(), False) == "<u>2+3?~<a>Let me add.\n<think>"
    assert WORDS.decode(taught[found[0].id], False) == "5~"
    whole = supervised.row("F, line 1", {"messages": [*begun, SAY]}, Columns())  # two turns, as they stand
    found, taught = supervised.tokenised([whole], WORDS, chat=chat, limit=99, most=9, where="F")
    assert WORDS.decode(found[0].tokens.tolist(), False) == "<u>2+3?~<a>Let me add.\n<think>~<a>"
    trimming = Chat(template="{% for m in messages %}<{{ m.role[0] }}>{{ m.content | trim }}~{% endfor %}")
    assert trimming.render([ASK, {"role": "assistant", "content": "It is  "}]) == "<u>2+3?~<a>It is"
    with pytest.raises(ValueError, match="leaves out or changes a part of it"):
        Chat(template="{{ messages[0].content }}").render(begun)
    refused("has no content that could be continued", chat.render, [ASK, {"role": "assistant", "tool_calls": []}])


def test_messages_written_as_a_text_are_messages(chat):
    for row in ({"prompt": json.dumps([ASK])}, {"prompt": [ASK]}):
        assert texts(row | {"answer": ""}, chat) == "<u>2+3?~<a>"
    one = supervised.row("F, line 1", {"messages": json.dumps([ASK, SAY])}, Columns())
    assert one["prompt"] == [ASK] and one["demonstration"] == SAY
    for text in ("[1, 2]", '[{"role": 5}]', "[role", '{"role": "king"}', '"role"'):
        assert Columns().row("F", {"prompt": text, "answer": ""})["prompt"] == text


def test_a_system_prompt_begins_what_has_none_of_its_own(chat):
    assert texts({"prompt": [ASK], "answer": ""}, chat, system="Add.") == "<s>Add.~<u>2+3?~<a>"
    own = [{"role": "system", "content": "Sum."}, ASK]
    assert texts({"prompt": own, "answer": ""}, chat, system="Add.") == "<s>Sum.~<u>2+3?~<a>"
    assert texts({"prompt": "2+3?", "answer": ""}, chat, system="Add.", chat=True) == "<s>Add.~<u>2+3?~<a>"
    with pytest.raises(
        ValueError, match=r"F: the prompt is a text, which data.system_prompt cannot begin; set data.chat=true"
    ):
        Columns(system="Add.").row("F", {"prompt": "2+3?"})


def test_pairs_with_a_text_prompt_and_whole_conversations_are_read_as_trl_does(chat):
    row = {"prompt": "2+3?", "chosen": [ASK, SAY], "rejected": [ASK, SAY | {"content": "6"}]}
    for given in (row, row | {"chosen": json.dumps(row["chosen"])}, {**row, "prompt": None} | {"prompt": "another"}):
        one = preferences.row("F, line 1", given, Columns(format="trl"))
        assert one["prompt"] == [ASK] and [side["content"] for side in one["pair"]] == ["5", "6"]
    with pytest.raises(ValueError, match="the prompt is a text: give both as texts, or both as messages"):
        preferences.row("F", {"prompt": "2+3?", "chosen": [SAY], "rejected": [SAY | {"content": "6"}]}, Columns())


def test_an_array_and_a_byte_order_mark_are_read(tmp_path):
    rows = [{"prompt": "2+3?", "answer": "5"}, {"prompt": "2+4?", "answer": "6"}]
    lines = "\n".join(map(json.dumps, rows))
    for text in (json.dumps(rows), "\n" + json.dumps(rows, indent=2), lines):
        for mark in ("", "\ufeff"):
            (tmp_path / "r.json").write_text(mark + text, encoding="utf-8")
            assert [row["answer"] for row in prompts.read(tmp_path / "r.json")] == ["5", "6"]
    (tmp_path / "r.json").write_text(json.dumps([rows[0], [1]]))
    refused(r"r.json, item 2: must be an object, got a list", prompts.read, tmp_path / "r.json")
    (tmp_path / "r.json").write_text("[1]\n" + lines)
    with pytest.raises(
        ValueError, match=r"r.json: no JSON: Extra data at line 2.* is one array of objects, else write one"
    ):
        prompts.read(tmp_path / "r.json")
    refused("no file openai/gsm8k; nothing of a hub is downloaded here", prompts.read, "openai/gsm8k")


def test_duplicates_are_refused_left_out_or_numbered():
    rows = [{"id": id, "where": f"F, line {line}"} for line, id in enumerate(["a", "b", "a", "a#2", "a"], start=1)]

    def settled(mode):
        found, notes = duplicates.settled(rows, mode, "data.train", "F")
        return [row["id"] for row in found], notes

    assert settled("refuse") == (["a", "b", "a", "a#2", "a"], ())
    assert settled("drop")[0] == ["a", "b", "a#2"] and settled("number")[0] == ["a", "b", "a#3", "a#2", "a#4"]
    assert settled("drop")[1] == (
        "data.train=F: 2 rows have an id that came before and are left out (data.duplicates='drop'); the first is F, line 3 (id 'a')",
    )
    assert duplicates.settled(rows[:2], "drop", "data.train", "F") == (rows[:2], ())


def test_a_template_is_told_the_date_that_was_fixed(tmp_path):
    (tmp_path / "chat_template.jinja").write_text("{{ strftime_now('%d %b %Y %H:%M') }}")
    for given, said in (("2026-07-31", "31 Jul 2026 00:00"), ("2026-07-31T12:05:09", "31 Jul 2026 12:05")):
        made = load(tmp_path, now=given)
        assert made.dated and made.render([ASK]) == said
        made.close()
    assert load(tmp_path).now is None and not Chat(template=TEMPLATE).dated
    assert Chat(template="x", now=datetime.datetime(2026, 1, 1)).render([ASK]) == "x"


def test_a_template_for_tools_stands_in_where_tools_are_given(tmp_path):
    named = [{"name": "default", "template": "plain"}, {"name": "tool_use", "template": "{{ tools[0].function.name }}"}]
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": named}))
    assert load(tmp_path).render([ASK]) == "plain" and load(tmp_path).render([ASK], arguments={"tools": [TOOL]}) == "f"


def test_reasoning_reaches_a_template_under_each_name():
    made = Chat(template="{{ messages[0].reasoning_content }}|{{ messages[0].thinking }}")
    for name in ("reasoning_content", "thinking", "reasoning"):
        assert made.render([{"role": "user", "content": "", name: "so"}]) == "so|so"


def test_a_null_of_a_message_is_left_out_for_every_caller(chat):
    """As transformers leaves it out; a template that asks whether there is a content else writes None."""
    call = {"function": {"name": "f", "arguments": {"a": 1}}}
    asked = [
        ASK,
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "content": "5", "name": None},
    ]
    made = Chat(template="{% for m in messages %}{{ m.content }}{{ 'name' in m }}{% endfor %}")
    assert made.render(asked) == "2+3?FalseFalse5False"
    made.close()


def test_turns_without_an_end_token_are_counted():
    taught = [
        supervised.Taught([5, 6, 1, 7, 9], [True, True, False, False, True]),
        supervised.Taught([5, 1, 7, 8, 1], [True, True, False, True, True]),
    ]
    assert supervised.without_end(taught, (1,)) == (4, 2) and supervised.without_end(taught[1:], (1,)) == (2, 0)
