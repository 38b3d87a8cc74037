"""Prompts: rows of a file or of a procedural task, as token ids, in an order that is a function of the position.

A row is {id, prompt, answer, source, extra}, from a file {where} too; `prompt` is a text or a list of {role, content}.
Which prompt stands at a position depends on (seed, epoch, index in the epoch) alone: the scheduler's cursor is the
whole state, on every host. Refused, each with file, line and column: a row without its columns, an id that comes twice,
a prompt over the limit, unless such prompts are dropped or cut (overlong.py).
"""

from __future__ import annotations

import copy
import hashlib
import inspect
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import grain
import numpy as np

from jaxrl_post.data import files, tasks
from jaxrl_post.data.chat import Chat
from jaxrl_post.data.columns import Columns
from jaxrl_post.data.overlong import Overlong
from jaxrl_post.data.tokenizer import Tokenizer
from jaxrl_post.json_text import of_hub, said, shown
from jaxrl_post.types import Prompt

_TASK = "task:"


class Prompts:
    """Random access by position; each epoch is a permutation of its own (grain MapDataset), or file order.

    `name`: what tells the order from that of another source under the same seed.

    Raises:
      ValueError: no prompts.
    """

    def __init__(self, prompts: Sequence[Prompt], seed: int, shuffle: bool = True, name: str = ""):
        if not prompts:
            raise ValueError("there are no prompts: the data has no rows")
        self._prompts = tuple(prompts)
        order = grain.MapDataset.range(len(self._prompts))
        # grain's epoch e of seed s is its epoch 0 of seed s + e, so neighbouring run seeds would share their epochs
        text = f"prompts{seed}/{name}" if name else f"prompts{seed}"
        key = int.from_bytes(hashlib.blake2b(text.encode(), digest_size=4).digest(), "little")
        self._order = (order.shuffle(seed=key) if shuffle else order).repeat()
        self._detour: Mapping[int, int] = {}

    def detoured(self, detour: Mapping[int, int]) -> Prompts:
        """Returns the same order, in which a position of `detour` stands for another one."""
        other = copy.copy(self)
        other._detour = dict(detour)
        return other

    def __len__(self) -> int:
        """Prompts per epoch."""
        return len(self._prompts)

    def __iter__(self) -> Iterator[Prompt]:
        """The prompts of an epoch, in the data's order."""
        return iter(self._prompts)

    def at(self, position: int) -> tuple[int, Prompt]:
        """(epoch, prompt) at a position counted from 0 over all epochs."""
        position = self._detour.get(position, position)
        return position // len(self._prompts), self._prompts[int(self._order[position])]


def rows(
    source: str, *, seed: int, split: str, size: int, arguments: Mapping | None = None, columns: Columns = Columns()
) -> list[dict]:
    """The rows of `source`: a file's path, read by `columns`, or "task:NAME" with seed, split ("train", "eval"), size,
    arguments.

    Raises:
      ValueError: no such task or file, or a bad row.
    """
    if not source.startswith(_TASK):
        return read(source, columns)
    name = source[len(_TASK) :]
    if name not in tasks.TASKS:
        raise ValueError(f"data: there is no task {shown(name)}; tasks are {', '.join(sorted(tasks.TASKS))}")
    make, given = tasks.TASKS[name].rows, dict(arguments or {})
    try:
        told = inspect.signature(make).bind(seed, split, size, **given)
    except TypeError as error:
        raise ValueError(f"data: arguments {said(given)} do not fit task {name!r}: {error}") from error
    for argument in given:
        kind = type(told.signature.parameters[argument].default)
        fits = (int, float) if kind is float else kind
        _need(
            kind is type or (isinstance(given[argument], fits) and not isinstance(given[argument], bool)),
            f"data: argument {argument}={shown(given[argument])} of task {name!r} must be {kind.__name__}",
        )
    return make(seed, split, size, **given)


def read(path: str | Path, columns: Columns = Columns()) -> list[dict]:
    """The rows of a JSONL or Parquet file, as `columns` reads them.

    Raises:
      ValueError: no such file, not readable, or a bad row, with its line and column.
    """
    if not Path(path).is_file():
        raise ValueError(
            f"data: there is no file {path}{of_hub(path)}; write a path of a JSONL or Parquet file, or task:NAME with "
            f"NAME one of {', '.join(sorted(tasks.TASKS))}"
        )
    return [columns.row(where, given) for where, given in files.objects(path)]


def tokenised(
    rows: Sequence[Mapping],
    tokenizer: Tokenizer,
    *,
    chat: Chat | None,
    limit: int,
    where: str = "data",
    overlong: Overlong | None = None,
) -> tuple[Prompt, ...]:
    """Prompts with their token ids. A text is encoded as it is; messages go through the chat template. A row may hold its
    `tokens`.

    Args:
      limit: most tokens a prompt may have.
      where: what the rows are called in an error.
      overlong: what becomes of prompts over the limit. None: they are refused.

    Raises:
      ValueError: messages without a template, a prompt that is empty or over the limit, an id that comes twice.
    """
    seen: dict[str, str] = {}
    out, overlong = [], overlong or Overlong()
    for number, row in enumerate(rows, start=1):
        place = row.get("where", f"{where}, row {number}")
        name = f"{place} (id {shown(row['id'])})"
        _need(
            row["id"] not in seen,
            f"{name}: has the id of {seen.get(row['id'])}; every row needs an id of its own "
            "(column 'id', or 'extra_info.index'), or data.duplicates=drop or number",
        )
        seen[row["id"]] = place
        messages = () if isinstance(row["prompt"], str) else tuple(row["prompt"])
        ids = row.get("tokens") or _encoded(name, row, messages, tokenizer, chat, limit, overlong)
        if not ids:
            continue
        out.append(
            Prompt(
                id=str(row["id"]),
                tokens=np.array(ids, np.int32),
                answer=row["answer"],
                source=row["source"],
                where=row.get("where", ""),
                lacks=row.get("lacks", ""),
                value=row.get("value"),
                messages=messages,
                arguments=row.get("arguments", {}),
                extra=row.get("extra", {}),
            )
        )
    return tuple(out)


def _encoded(
    name: str, row: Mapping, messages: tuple, tokenizer: Tokenizer, chat: Chat | None, limit: int, overlong: Overlong
) -> list[int]:
    _need(
        not messages or chat is not None,
        f"{name}: the prompt is a list of messages, but the tokenizer has no chat "
        "template; add chat_template.jinja beside it, or give the prompt as a text",
    )
    try:
        text = rendered(chat, row) if messages else row["prompt"]
        return overlong.fitted(name, text, tokenizer, not messages, limit)
    except ValueError as error:
        raise ValueError(f"{name}: {error}") from error


def rendered(chat: Chat, row: Mapping) -> str:
    """Returns the text of a row's messages, up to where the policy begins. A last message of the assistant is continued,
    unless the row says by `continues` that it is another turn."""
    return chat.render(row["prompt"], arguments=row.get("arguments", {}), continues=row.get("continues", True))


def _need(condition: bool, sentence: str) -> None:
    if not condition:
        raise ValueError(sentence)
