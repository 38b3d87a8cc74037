"""Rows of conversations of which every assistant's turn is trained on, as TRL does with assistant_only_loss.

The chat template says what an assistant wrote, by its {% generation %} marks. A token is trained on where it overlaps a
mark, as in transformers' apply_chat_template(return_assistant_tokens_mask=True). No end token is added.

A row is `messages`. Its prompt is what lies before the first trained token. Tokens between two turns are shown, as what an
environment says in reinforcement learning. What follows the last trained token is left out, because nothing reads it.
Refused: a row without `messages`, a template without marks, and a conversation in which nothing would be trained on.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Collection, Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

from jaxrl_post.data import prompts, supervised
from jaxrl_post.data.chat import Chat
from jaxrl_post.data.columns import Columns
from jaxrl_post.data.overlong import measured
from jaxrl_post.data.tokenizer import JsonTokenizer, Tokenizer
from jaxrl_post.json_text import shown
from jaxrl_post.types import Prompt


class Taught(NamedTuple):
    """`tokens` int[T] behind the prompt, and `trained` bool[T]: which of them are trained on."""

    tokens: list[int]
    trained: list[bool]


def row(where: str, given: Any, columns: Columns) -> dict:
    """Returns one row, as Columns.row does, whose prompt is the whole conversation.

    Raises:
      ValueError: a row that is refused, with `where`.
    """
    if isinstance(given, dict):
        supervised.refuse_preferences(where, given)
    if isinstance(given, dict) and "messages" not in given:
        raise ValueError(
            f"data: {where}: there is no column 'messages', of which data.assistant_only_loss=true trains on every "
            "assistant's turn; leave the option out for rows of other columns"
        )
    if isinstance(given, dict):
        given = given | {"messages": supervised.talk(where, given["messages"])}
    own = dataclasses.replace(columns, named={**columns.named, "prompt": "messages"})
    out = own.row(where, given)
    return out | {"extra": out["extra"] | {"messages": given["messages"]}}


def tokenised(
    rows: Sequence[Mapping], words: Tokenizer, *, chat: Chat | None, limit: int, most: int, where: str
) -> tuple[tuple[Prompt, ...], dict[str, Taught]]:
    """Returns the prompts, as prompts.tokenised does, and what is taught behind each, by prompt id.

    Args:
      limit: most tokens of a prompt.
      most: most tokens from the first to the last that is trained on.
      where: what the rows are called in an error.

    Raises:
      ValueError: a row that is refused, with file and line.
    """
    begun, taught = [], {}
    for one in rows:
        place = f"{one['where']} (id {shown(one['id'])})"
        try:
            tokens, mask = masked(one["prompt"], words, chat, limit + most, one.get("arguments", {}))
        except ValueError as error:
            raise ValueError(f"{place}: {error}") from error
        mask[:1] = [False]  # nothing comes before the first token
        if not any(mask):
            raise ValueError(f"{place}: no token of the conversation lies in a turn of the assistant")
        first, last = mask.index(True), len(mask) - mask[::-1].index(True)
        supervised.check_length(one["id"], last - first, most, where)
        taught[one["id"]] = Taught(tokens[first:last], mask[first:last])
        begun.append({**one, "tokens": tokens[:first]})
    return prompts.tokenised(begun, words, chat=chat, limit=limit, where=where), taught


def without_end(taught: Iterable[Taught], ends: Collection[int]) -> tuple[int, int]:
    """Returns how many turns are trained on, and how many of them without a token of `ends`: nothing teaches them to stop."""
    turns = []
    for one in taught:
        for trained, run in itertools.groupby(zip(one.trained, one.tokens), key=lambda pair: pair[0]):
            turns += [any(token in ends for _, token in run)] if trained else []
    return len(turns), turns.count(False)


def masked(
    messages: Sequence[Mapping],
    words: Tokenizer,
    chat: Chat | None,
    most: int,
    arguments: Mapping[str, Any] = MappingProxyType({}),
) -> tuple[list[int], list[bool]]:
    """Returns the tokens of a conversation, and of each whether an assistant wrote it. `arguments`: of Chat.render.

    Raises:
      ValueError: there is no template, it has no marks or refuses the messages, or the tokenizer has no places.
    """
    if chat is None:
        raise ValueError("the tokenizer has no chat template, whose marks say what an assistant wrote")
    if not isinstance(words, JsonTokenizer):
        raise ValueError("a llama2.c vocabulary does not say where its tokens lie; name a tokenizer.json")
    text, blocks = chat.marked(messages, arguments)
    measured("the conversation", text, words, most)
    found = words.located(text)
    inside = [any(start < end and stop > begin for begin, end in blocks) for _, start, stop in found]
    return [token for token, _, _ in found], inside
