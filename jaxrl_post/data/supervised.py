"""Rows of supervised training under TRL's names: what is shown, and what is trained on.

A row is read as the first of these that it has:

- `completion` beside a prompt: two texts, or messages. The completion is trained on.
- `messages`: the last message, of the assistant, is trained on. All others are shown.
- `text` without a prompt: every token but the first, which nothing comes before.
- `solution` beside a prompt, else the prompt's ground truth.

Every completion is closed by an end token. In a chat template it ends with the template's own end token: what the template
writes behind it is not trained on, because a policy never writes there. A template may write the head of an assistant's turn
in another way when a completion follows. Then training begins at the first token that differs, as in TRL, and the rest of the
head is left out. Refused: a template that writes the messages themselves in another way, a completion that is empty behind
the template, and rows of preferences.

With data.assistant_only_loss a row is `messages`, and every assistant's turn is trained on, as TRL does with
assistant_only_loss (the functions below `Taught`). The chat template says what an assistant wrote, by its {% generation %}
marks. A token is trained on where it overlaps a mark, as in transformers'
apply_chat_template(return_assistant_tokens_mask=True). No end token is added. The prompt is what lies before the first trained
token. Tokens between two turns are shown, as what an environment says in reinforcement learning. What follows the last
trained token is left out, because nothing reads it. Refused: a row without `messages`, a template without marks, and a
conversation in which nothing would be trained on.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Collection, Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

from jaxrl_post.data import messages, prompts
from jaxrl_post.data.chat import Chat, text_of
from jaxrl_post.data.columns import Columns
from jaxrl_post.data.continuations import common
from jaxrl_post.data.prompts import measured
from jaxrl_post.data.tokenizer import JsonTokenizer, Tokenizer
from jaxrl_post.ring.json_text import shown
from jaxrl_post.ring.types import Prompt

_ROLE = "assistant"
_NEAR = 40  # characters around a difference
_WHOLE = "whole conversation"


def row(where: str, given: Any, columns: Columns) -> dict:
    """Returns one row, as Columns.row does, with `demonstration`: what is trained on.

    It is a text, an assistant's message, or None for a row of `text`, which is trained on as a whole.
    """
    if not isinstance(given, dict):
        return columns.row(where, given)
    refuse_preferences(where, given)
    name, said = columns.first(given, "completion")
    if name:
        out = columns.row(where, given)
        return _with_truth(out, completion(f"data: {where}, column {name!r}", said, out["prompt"]))
    if "messages" in given:
        return _conversation(where, given, columns)
    asked, _ = columns.first(given, "prompt")
    if not asked and "text" in given:
        if columns.template or columns.chat:
            raise ValueError(
                f"data: {where}, column 'text': is trained on as it is: data.template and data.chat do not apply to it; leave "
                "them out, or write rows of prompt and completion"
            )
        return with_prompt("text", columns).row(where, given) | {"demonstration": None}
    out = columns.row(where, given)
    solution = out["extra"].get("solution")
    if out.get("lacks") and not solution:
        raise ValueError(
            f"data: {where}: {out['lacks']}, and there is no column 'completion', 'messages' or 'solution': "
            "engine.name='demonstrations' has nothing to demonstrate"
        )
    return out | {"demonstration": str(solution) if solution is not None else out["answer"]}


def refuse_preferences(where: str, given: Mapping) -> None:
    """Refuses rows that compare or label completions: some of them must not be learnt."""
    both = [name for name in ("chosen", "rejected") if name in given]
    labelled = "completion" in given and isinstance(given.get("label"), bool)
    if both or labelled:
        names = " and ".join(map(repr, both)) if both else "'completion' and a 'label' of true or false"
        raise ValueError(
            f"data: {where}: is a row of preferences, with {names}: supervised training learns every row's completion; "
            "write rows of prompt and completion with those to be learnt"
        )


def completion(where: str, said: Any, prompt: str | list) -> str | dict:
    """Returns the completion of a prompt: a text behind a text, an assistant's message behind messages."""
    said = messages.read(where, said)
    one = isinstance(said, list) and len(said) == 1 and isinstance(said[0], dict) and said[0].get("role") == _ROLE
    if not one and not isinstance(said, str):
        raise ValueError(f"{where}: must be a text or one message of the assistant, got {shown(said)}")
    if one and isinstance(prompt, str):
        raise ValueError(f"{where}: is a message, but the prompt is a text: give both as texts, or both as messages")
    if one:
        return messages.check(where, said)[0]
    return said if isinstance(prompt, str) else {"role": _ROLE, "content": said}


def _conversation(where: str, given: dict, columns: Columns) -> dict:
    """Returns a row of `messages`. The whole conversation stays a column, for reward functions."""
    whole, place = talk(where, given["messages"]), f"data: {where}, column 'messages'"
    if whole[-1]["role"] != _ROLE:
        raise ValueError(
            f"{place}: its last message is of {shown(whole[-1]['role'])}, not of 'assistant': it has no completion"
        )
    if len(whole) == 1:
        raise ValueError(f"{place}: holds a completion and no prompt")
    given = given | {"messages": whole[:-1], _WHOLE: whole}
    out = with_prompt("messages", columns).row(where, given)  # so the row's hash is of all of it
    extra = {name: value for name, value in out["extra"].items() if name != _WHOLE} | {"messages": whole}
    return _with_truth(out | {"extra": extra, "continues": False}, whole[-1])


def talk(where: str, given: Any) -> list[dict]:
    """Returns the conversation in a column `messages`, without nulls."""
    place = f"data: {where}, column 'messages'"
    found = messages.read(place, given)
    if not isinstance(found, list) or not found:
        raise ValueError(f"{place}: must be a list of messages, got {shown(given)}")
    return messages.check(place, found)


def with_prompt(column: str, columns: Columns) -> Columns:
    """Returns columns of which this one holds the prompt."""
    return dataclasses.replace(columns, named={**columns.named, "prompt": column})


def _with_truth(out: dict, demonstration: str | dict) -> dict:
    """Returns a row with its demonstration, which is the ground truth where the row has no other."""
    said = demonstration if isinstance(demonstration, str) else text_of(demonstration.get("content"))
    if out.get("lacks") and said.strip():
        out = {name: value for name, value in out.items() if name != "lacks"} | {"answer": said}
    return out | {"demonstration": demonstration}


def questions(rows: Sequence[Mapping]) -> list[dict]:
    """Returns rows without their demonstrations, to be asked in an evaluation."""
    for one in rows:
        if one["demonstration"] is None:
            raise ValueError(
                f"data: {one['where']}: a row of 'text' asks nothing that could be evaluated; name a file with prompts as "
                "eval.data, or set eval.prompts=0"
            )
    return [{name: value for name, value in one.items() if name != "demonstration"} for one in rows]


def tokenised(
    rows: Sequence[Mapping],
    words: Tokenizer,
    *,
    chat: Chat | None,
    limit: int,
    most: int,
    where: str,
    left: dict[str, str] | None = None,
) -> tuple[tuple[Prompt, ...], dict[str, list[int]]]:
    """Returns the prompts, as prompts.tokenised does, and the tokens that are trained on, by prompt id.

    Args:
      limit: most tokens of a prompt.
      most: most tokens of a demonstration with its end token.
      where: what the rows are called in an error.
      left: gets, by prompt id, the end of a prompt that is left out (Completed.left).

    Raises:
      ValueError: a demonstration that is empty, too long or cannot be cut from its prompt, with file and line.
    """
    begun, taught = [], {}
    left = {} if left is None else left
    for one in rows:
        place = f"{one['where']} (id {shown(one['id'])})"
        if one["demonstration"] is None:
            ids = _ended(_encoded(place, one["prompt"], words, limit + most), words)
            one = {**one, "tokens": ids[:1]}
            taught[one["id"]] = ids[1:]
        else:
            found = completed(place, one, one["demonstration"], words, chat, limit + most)
            taught[one["id"]] = found.tokens
            if found.left:
                one = {**one, "tokens": fitting(place, found.shown, limit)}
                left[one["id"]] = found.left
        check(place, one["id"], taught[one["id"]], words, most, where)
        begun.append(one)
    return prompts.tokenised(begun, words, chat=chat, limit=limit, where=where), taught


class Completed(NamedTuple):
    """A completion behind its prompt.

    `tokens`: of the completion, with an end token. `shown`: of the prompt, empty where they are its own. `left`: the text of the
    prompt's last tokens that are left out, because the chat template writes them in another way when a completion follows.
    """

    tokens: list[int]
    shown: list[int]
    left: str = ""


def completed(place: str, row: Mapping, said: str | dict, words: Tokenizer, chat: Chat | None, most: int) -> Completed:
    """Returns the tokens of a completion behind its row's prompt."""
    prompt = row["prompt"]
    if isinstance(said, str) and not isinstance(prompt, str):  # a ground truth behind messages
        return Completed(_ended(_encoded(place, said, words, most, special=False), words), [])
    if isinstance(said, str):
        head, ids = (_encoded(place, text, words, most) for text in (prompt, prompt + said))
        if ids[: len(head)] != head:
            raise ValueError(
                f"{place}: a token reaches from the prompt into the completion, so that the prompt alone has other tokens; move the "
                "space between them to the completion, or change the end of the prompt"
            )
        return Completed(_ended(ids[len(head) :], words), head)
    if chat is None:
        raise ValueError(
            f"{place}: the completion is a message, but the tokenizer has no chat template; add chat_template.jinja beside it, "
            "or give prompt and completion as texts"
        )
    try:
        head, arguments = prompts.rendered(chat, row), row.get("arguments", {})
        whole = chat.render(_whole(row, said), generation=False, arguments=arguments)
        if not whole.startswith(head):
            _check_messages(chat, chat.render(prompt, generation=False, arguments=arguments), head, whole)
    except ValueError as error:
        raise ValueError(f"{place}: {error}") from error
    head_ids, ids = (_encoded(place, text, words, most, special=False) for text in (head, whole))
    same = common(head_ids, ids)
    left = words.decode(head_ids[same:], skip_special=False, before=head_ids[:same])
    return Completed(_closed(place, ids[same:], words), head_ids[:same], left)


def _check_messages(chat: Chat, bare: str, head: str, whole: str) -> None:
    """Refuses a template that writes the messages of a prompt in another way when a completion follows.

    `bare`: the text of the prompt without the head of an assistant's turn. `head`: with it. `whole`: with the completion.
    """
    for other in (head, whole):
        if not bare or not other.startswith(bare):
            same = common(bare, other)
            begin = max(same - _NEAR // 2, 0)
            sides = [shown(one[begin : same + _NEAR]) for one in (bare, other)]
            when = "the head of an assistant's turn" if other is head else "a completion"
            raise ValueError(
                f"the chat template{f' {chat.file}' if chat.file else ''} writes the prompt in another way when {when} follows: "
                f"at character {same} it writes {sides[0]} without and {sides[1]} with it, so that what would be trained on "
                "cannot be cut from the prompt; make the text of a message depend on no later one, or give prompt and "
                "completion as texts"
            )


def fitting(place: str, ids: list[int], limit: int) -> list[int]:
    if len(ids) > limit:
        raise ValueError(
            f"{place}: the prompt has {len(ids)} tokens; it may have {limit} (engine.max_length - sampling.max_tokens)"
        )
    return ids


def said_of(left: Mapping[str, str], option: str, source: str, rows: int, chat: Chat | None) -> tuple[str, ...]:
    """Returns a line on prompts whose end is left out, or none. `left`: their ends."""
    if not left or chat is None:
        return ()
    return (
        f"{option}={source}: in {len(left)} of {rows} rows the prompt ends in other tokens when a completion follows"
        f"{f' (chat template {chat.file})' if chat.file else ''}: {shown(next(iter(left.values())))} stands before a rollout "
        "and is left out before what is trained on, which begins at the first token that differs, as in TRL; to train what "
        "is sampled, let the template write both alike, or set data.chat_template_kwargs so that it does",
    )


def _whole(row: Mapping, said: Mapping) -> list[Mapping]:
    """Returns a prompt with its completion, which is the rest of a message of the assistant that the prompt ends with."""
    *before, last = row["prompt"]
    if last["role"] != _ROLE or not row.get("continues", True):
        return [*before, last, said]
    begun, rest = last.get("content", ""), said.get("content", "")
    if isinstance(begun, list) or isinstance(rest, list):
        begun, rest = text_of(begun), text_of(rest)
    return [*before, {**last, **said, "content": begun + rest}]


def _encoded(place: str, text: str, words: Tokenizer, most: int, special: bool = True) -> list[int]:
    try:
        measured("the row", text, words, most)
        return words.encode(text, special=special)
    except ValueError as error:
        raise ValueError(f"{place}: {error}") from error


def _ended(ids: list[int], words: Tokenizer) -> list[int]:
    return ids if ids[-1:] and ids[-1] in words.eos_ids else [*ids, words.eos_ids[0]]


def _closed(place: str, ids: list[int], words: Tokenizer) -> list[int]:
    """Returns the tokens of a template up to its end token, or with one."""
    ends = [index for index, token in enumerate(ids) if token in words.eos_ids]
    if not ends:
        return _ended(ids, words)
    if words.decode(ids[ends[0] + 1 :]).strip():
        raise ValueError(
            f"{place}: the chat template ends the completion and goes on writing: {shown(words.decode(ids))}"
        )
    return ids[: ends[0] + 1]


def check(place: str, id: str, ids: list[int], words: Tokenizer, most: int, where: str) -> None:
    if not words.decode([token for token in ids if token not in words.eos_ids]).strip():
        raise ValueError(f"{place}: the demonstration is empty: only an end token would be trained on")
    check_length(id, len(ids), most, where)


def check_length(id: str, tokens: int, most: int, where: str) -> None:
    if tokens > most:
        raise ValueError(
            f"data: {where}: the demonstration of prompt {id!r} has {tokens} tokens with its end, more than "
            f"sampling.max_tokens={most}; the nearest valid value is {tokens}"
        )


class Taught(NamedTuple):
    """`tokens` int[T] behind the prompt, and `trained` bool[T]: which of them are trained on."""

    tokens: list[int]
    trained: list[bool]


def conversation_row(where: str, given: Any, columns: Columns) -> dict:
    """Returns one row, as Columns.row does, whose prompt is the whole conversation."""
    if not isinstance(given, dict):
        return columns.row(where, given)
    refuse_preferences(where, given)
    if "messages" not in given:
        raise ValueError(
            f"data: {where}: there is no column 'messages', of which data.assistant_only_loss=true trains on every "
            "assistant's turn; leave the option out for rows of other columns"
        )
    given = given | {"messages": talk(where, given["messages"])}
    out = with_prompt("messages", columns).row(where, given)
    return out | {"extra": out["extra"] | {"messages": given["messages"]}}


def tokenised_conversations(
    rows: Sequence[Mapping], words: Tokenizer, *, chat: Chat | None, limit: int, most: int, where: str
) -> tuple[tuple[Prompt, ...], dict[str, Taught]]:
    """Returns the prompts, as prompts.tokenised does, and what is taught behind each, by prompt id.

    Args:
      limit: most tokens of a prompt.
      most: most tokens from the first to the last that is trained on.
      where: what the rows are called in an error.
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
        check_length(one["id"], last - first, most, where)
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
    """Returns the tokens of a conversation, and of each whether an assistant wrote it. `arguments`: of Chat.render."""
    if chat is None:
        raise ValueError("the tokenizer has no chat template, whose marks say what an assistant wrote")
    if not isinstance(words, JsonTokenizer):
        raise ValueError("a llama2.c vocabulary does not say where its tokens lie; name a tokenizer.json")
    text, blocks = chat.marked(messages, arguments)
    measured("the conversation", text, words, most)
    found = words.located(text)
    inside = [any(start < end and stop > begin for begin, end in blocks) for _, start, stop in found]
    return [token for token, _, _ in found], inside
