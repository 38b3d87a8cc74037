"""Rows of preferences under TRL's names, their tokens spelt out by hand."""

from __future__ import annotations

import pytest
from mask_arms import say
from refusals import refused
from test_data_supervised import TEMPLATE, WORDS, ids

from jaxrl_post.data import preferences, tasks
from jaxrl_post.data.chat import Chat
from jaxrl_post.data.columns import Columns


@pytest.fixture
def chat():
    made = Chat(template=TEMPLATE)
    yield made
    made.close()


def both(row, chat, **columns):
    rows = [preferences.row("f.jsonl, line 1", row, Columns(**columns))]
    (prompt,), pairs = preferences.tokenised(rows, WORDS, chat=chat, limit=60, most=20, where="f")
    return prompt.tokens.tolist(), pairs[prompt.id]


HEAD = "<user>q!\n<assistant>"


@pytest.mark.parametrize(
    "row, prompt",
    [
        ({"prompt": "1+1=", "chosen": "2", "rejected": "3"}, "1+1="),
        ({"prompt": [say("user", "q")], "chosen": [say("assistant", "2")], "rejected": [say("assistant", "3")]}, HEAD),
        (
            {
                "chosen": [say("user", "q"), say("assistant", "2")],
                "rejected": [say("user", "q"), say("assistant", "3")],
            },
            HEAD,
        ),
    ],
)
def test_prompt_chosen_and_rejected(row, prompt, chat):
    assert both(row, chat) == (ids(prompt), (ids("2!"), ids("3!")))


@pytest.mark.parametrize(
    "row, why",
    [
        ({"prompt": "a", "chosen": "b"}, "line 1: there is no column 'rejected'"),
        ({"prompt": "a", "chosen": "b", "rejected": "b"}, "'chosen' and 'rejected' are equal"),
        ({"prompt": "a", "chosen": "b", "rejected": " "}, "column 'rejected': the demonstration is empty"),
        ({"prompt": "a", "chosen": "b", "rejected": 1}, "column 'rejected': must be a text or one message"),
        ({"chosen": "b", "rejected": "c"}, "has no prompt, and 'chosen' and 'rejected' are no conversations"),
        ({"chosen": [say("user", "a")], "rejected": [say("user", "b")]}, "do not begin with the same messages"),
        ({"prompt": "a", "chosen": "b" * 30, "rejected": "c"}, "more than sampling.max_tokens=20"),
        ([1], "must be an object"),
    ],
)
def test_what_is_refused_with_file_and_line(row, why, chat):
    refused(why, both, row, chat)


def test_pairs_of_a_task():
    rows = tasks.TASKS["sums"].rows(0, "sft", 50)
    for one in preferences.of_task(rows, tasks.TASKS["sums"], "task:sums"):
        chosen, rejected = one["pair"]
        assert chosen.endswith(f"#{one['answer']}") and rejected.startswith("#") and rejected[1:] != one["answer"]
        assert int(one["answer"]) - int(rejected[1:]) in one["extra"]["terms"][1:]
    refused("this task has no preferences", preferences.of_task, rows, tasks.TASKS["sorting"], "task:sorting")
