"""Rows of preferences under TRL's names: prompt, chosen and rejected, as texts or as messages.

Without a prompt, `chosen` and `rejected` are two conversations, and the messages with which both begin are the prompt. So
they are beside a prompt that is a text. Each
completion ends as a supervised one does (supervised.py): with an end token, behind which nothing is trained on.
Refused: a completion that is empty or cannot be cut from its prompt, and a pair of two equal ones.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from jaxrl_post.data import messages, prompts, supervised
from jaxrl_post.data.chat import Chat
from jaxrl_post.data.columns import Columns
from jaxrl_post.data.continuations import common
from jaxrl_post.data.tasks import Task
from jaxrl_post.data.tokenizer import Tokenizer
from jaxrl_post.ring.json_text import shown
from jaxrl_post.ring.types import Prompt

SIDES = ("chosen", "rejected")


def row(where: str, given: Any, columns: Columns) -> dict:
    """Returns one row, as Columns.row does, with `pair`: what was chosen and what was rejected, texts or messages."""
    if not isinstance(given, dict):
        return columns.row(where, given)
    for side in SIDES:
        if side not in given:
            raise ValueError(
                f"data: {where}: there is no column {side!r}: engine.name='preferences' compares two completions"
            )
    given = given | {side: messages.read(f"data: {where}, column {side!r}", given[side]) for side in SIDES}
    split = _are_whole(where, given, columns)
    if split:
        given = _split(where, given)
        columns = supervised.with_prompt("prompt", columns)
    out = columns.row(where, given) | ({"continues": False} if split else {})
    pair = [supervised.completion(f"data: {where}, column {side!r}", given[side], out["prompt"]) for side in SIDES]
    if pair[0] == pair[1]:
        raise ValueError(f"data: {where}: columns 'chosen' and 'rejected' are equal, which prefers nothing")
    return out | {"pair": pair}


def of_task(rows: Sequence[Mapping], task: Task, source: str) -> list[dict]:
    """Returns the rows of a procedural task, each with its `pair`."""
    if task.prefer is None:
        raise ValueError(f"data: {source}: this task has no preferences; name a file of them, or 'task:sums'")
    return [{"where": one["id"], **one, "pair": list(task.prefer(one["extra"]))} for one in rows]


def check_margins(rows: Sequence[Mapping]) -> None:
    """Refuses a column `margin` that is no number. It says by how much the chosen completion must be better, as in TRL."""
    for one in rows:
        margin = one["extra"].get("margin")
        number = isinstance(margin, (int, float)) and not isinstance(margin, bool) and math.isfinite(margin)
        if margin is not None and not number:
            raise ValueError(f"data: {one['where']}, column 'margin': must be a finite number, got {shown(margin)}")


def _are_whole(where: str, given: Mapping, columns: Columns) -> bool:
    """Returns whether both completions hold their prompt: a row without one, or whose prompt is a text, as TRL reads it."""
    name, prompt = columns.first(given, "prompt")
    if not name or not isinstance(messages.read(f"data: {where}, column {name!r}", prompt), str):
        return not name
    return all(isinstance(given[side], list) and len(given[side]) > 1 for side in SIDES)


def _split(where: str, given: Mapping) -> dict:
    """Returns a row whose prompt is the messages with which both of its conversations begin."""
    talks = [given[side] for side in SIDES]
    if not all(isinstance(talk, list) for talk in talks):
        raise ValueError(f"data: {where}: has no prompt, and 'chosen' and 'rejected' are no conversations of messages")
    same = common(*talks)
    if not same:
        raise ValueError(f"data: {where}: 'chosen' and 'rejected' do not begin with the same messages")
    return {**given, "prompt": talks[0][:same], **{side: talk[same:] for side, talk in zip(SIDES, talks, strict=True)}}


def tokenised(
    rows: Sequence[Mapping],
    words: Tokenizer,
    *,
    chat: Chat | None,
    limit: int,
    most: int,
    where: str,
    left: dict[str, str] | None = None,
) -> tuple[tuple[Prompt, ...], dict[str, tuple[list[int], list[int]]]]:
    """Returns the prompts, as prompts.tokenised does, and the tokens of both completions, by prompt id.

    Args:
      limit: most tokens of a prompt.
      most: most tokens of a completion with its end token.
      where: what the rows are called in an error.
      left: as in supervised.tokenised. Both completions begin where the first of them differs from the prompt.
    """
    begun, pairs = [], {}
    left = {} if left is None else left
    for one in rows:
        place = f"{one['where']} (id {shown(one['id'])})"
        places = [f"{place}, column {side!r}" for side in SIDES]
        both = [
            supervised.completed(side, one, said, words, chat, limit + most)
            for side, said in zip(places, one["pair"], strict=True)
        ]
        same = common(*(found.shown for found in both))
        sides = [found.shown[same:] + found.tokens for found in both]
        for side, tokens in zip(places, sides, strict=True):
            supervised.check(side, one["id"], tokens, words, most, where)
        pairs[one["id"]] = (sides[0], sides[1])
        ends = [found.left for found in both if found.left]
        if ends:
            one = {**one, "tokens": supervised.fitting(place, both[0].shown[:same], limit)}
            left[one["id"]] = max(ends, key=len)
        begun.append(one)
    return prompts.tokenised(begun, words, chat=chat, limit=limit, where=where), pairs
