"""Prompts: rows of a JSONL file or of a procedural task, as token ids, in an order that is a function of the position.

A row is {id, prompt, answer, source, extra}; `prompt` is a text or a list of {role, content}. Which prompt stands at a
position depends on (seed, epoch, index in the epoch) alone: the scheduler's cursor is the whole state, on every host.
Refused, each with file, line and column: a row without its columns, an id that comes twice, a prompt over the limit.
"""

from __future__ import annotations

import hashlib
import inspect
import json
from collections.abc import Mapping, Sequence
from pathlib import Path

import grain
import numpy as np

from jaxrl_post.data import tasks
from jaxrl_post.data.chat import Chat
from jaxrl_post.data.tokenizer import Tokenizer
from jaxrl_post.types import Prompt

_TASK = "task:"


class Prompts:
    """Random access by position; each epoch is a permutation of its own (grain MapDataset), or file order.

    Raises:
      ValueError: no prompts.
    """

    def __init__(self, prompts: Sequence[Prompt], seed: int, shuffle: bool = True):
        if not prompts:
            raise ValueError("there are no prompts: the data has no rows")
        self._prompts = tuple(prompts)
        order = grain.MapDataset.range(len(self._prompts))
        # grain's epoch e of seed s is its epoch 0 of seed s + e, so neighbouring run seeds would share their epochs
        key = int.from_bytes(hashlib.blake2b(f"prompts{seed}".encode(), digest_size=4).digest(), "little")
        self._order = (order.shuffle(seed=key) if shuffle else order).repeat()

    def __len__(self) -> int:
        """Prompts per epoch."""
        return len(self._prompts)

    def at(self, position: int) -> tuple[int, Prompt]:
        """(epoch, prompt) at a position counted from 0 over all epochs."""
        return position // len(self._prompts), self._prompts[int(self._order[position])]


def rows(source: str, *, seed: int, split: str, size: int, arguments: Mapping | None = None) -> list[dict]:
    """The rows of `source`: a JSONL file's path, or "task:NAME" with seed, split ("train", "eval"), size, arguments.

    Raises:
      ValueError: no such task or file, or a bad row.
    """
    if not source.startswith(_TASK):
        return read(source)
    name = source[len(_TASK):]
    if name not in tasks.TASKS:
        raise ValueError(f"data: there is no task {name!r}; tasks are {', '.join(sorted(tasks.TASKS))}")
    given = (seed, split, size), dict(arguments or {})
    try:
        inspect.signature(tasks.TASKS[name].rows).bind(*given[0], **given[1])
    except TypeError as error:
        raise ValueError(f"data: arguments {given[1]} do not fit task {name!r}: {error}") from error
    return tasks.TASKS[name].rows(*given[0], **given[1])


def read(path: str | Path) -> list[dict]:
    """The rows of a JSONL file, one object per line, empty lines left out: verl's columns (`data_source`, `prompt`,
    `reward_model.ground_truth`, `extra_info`, `ability`), or this project's (`source`, `prompt`, `answer`, `extra`).

    The id is the column `id`, else data_source/split/index from `extra_info`, else a hash of the row's content. A
    ground truth that is no text becomes its JSON. Every other column goes to `extra`, below `extra_info`'s own.

    Raises:
      ValueError: no such file, not UTF-8, or a bad row, with its line and column.
    """
    path = Path(path)
    if not path.is_file():
        raise ValueError(f"data: there is no file {path}; write a path of a JSONL file, or task:NAME with NAME one of "
                         f"{', '.join(sorted(tasks.TASKS))}")
    if path.suffix == ".parquet":
        raise ValueError(f"data: {path} is a parquet file; write it as JSONL, an object with the same columns per line")
    try:
        lines = path.read_text(encoding="utf-8").split("\n")
    except UnicodeDecodeError as error:
        raise ValueError(f"data: {path} is no UTF-8 text: {error}") from error
    return [_row(f"{path}, line {number}", line) for number, line in enumerate(lines, start=1) if line.strip()]


def _row(where: str, line: str) -> dict:
    try:
        given = json.loads(line)
    except json.JSONDecodeError as error:
        raise ValueError(f"data: {where}: no JSON: {error.msg} at character {error.colno}") from error
    _need(isinstance(given, dict), f"data: {where}: must be an object, got a {type(given).__name__}")
    known = {"id", "prompt", "data_source", "source", "reward_model", "answer", "extra_info", "extra"}
    info = given.get("extra_info", given.get("extra")) or {}
    _need(isinstance(info, dict), f"data: {where}, column 'extra_info': must be an object, got {info!r}")
    source = given.get("data_source", given.get("source", ""))
    _need(isinstance(source, str), f"data: {where}, column 'data_source': must be a text, got {source!r}")
    row = {"prompt": _prompt(where, given), "answer": _answer(where, given), "source": source,
           "extra": {k: v for k, v in given.items() if k not in known} | info}
    return {"id": _identity(given, info, row), **row}


def _prompt(where: str, given: dict) -> str | list[dict]:
    _need("prompt" in given,
          f"data: {where}: there is no column 'prompt'; its columns are {', '.join(given) or 'none'}")
    prompt = given["prompt"]
    if isinstance(prompt, str):
        _need(prompt != "", f"data: {where}, column 'prompt': is empty")
        return prompt
    _need(isinstance(prompt, list) and len(prompt) > 0, f"data: {where}, column 'prompt': must be a text or a list of "
          f"messages, got {str(prompt)[:80]!r}")
    for i, message in enumerate(prompt):
        _need(isinstance(message, dict) and isinstance(message.get("role"), str) and "content" in message,
              f"data: {where}, column 'prompt[{i}]': must be an object with role and content: {str(message)[:60]!r}")
    return prompt


def _answer(where: str, given: dict) -> str:
    model = given.get("reward_model")
    if isinstance(model, dict) and "ground_truth" in model:
        answer = model["ground_truth"]
    else:
        _need("answer" in given, f"data: {where}: there is no column 'reward_model.ground_truth' (nor 'answer'); its "
              f"columns are {', '.join(given)}")
        answer = given["answer"]
    return answer if isinstance(answer, str) else json.dumps(answer, ensure_ascii=False)


def _identity(given: dict, info: dict, row: dict) -> str:
    if given.get("id") is not None:
        return str(given["id"])
    if info.get("index") is not None:
        parts = (row["source"], info.get("split"), info["index"])
        return "/".join(str(part) for part in parts if part not in (None, ""))
    content = json.dumps(row, sort_keys=True, ensure_ascii=True)
    return hashlib.blake2b(content.encode(), digest_size=8).hexdigest()


def tokenised(rows: Sequence[Mapping], tokenizer: Tokenizer, *, chat: Chat | None, limit: int,
              where: str = "data") -> tuple[Prompt, ...]:
    """Prompts with their token ids. A text is encoded as it is; messages go through the chat template.

    Args:
      limit: most tokens a prompt may have.
      where: what the rows are called in an error.

    Raises:
      ValueError: messages without a template, a prompt that is empty or over the limit, an id that comes twice.
    """
    seen: dict[str, int] = {}
    out = []
    for number, row in enumerate(rows, start=1):
        name = f"{where}, row {number} (id {row['id']!r})"
        _need(row["id"] not in seen, f"{name}: has the id of row {seen.get(row['id'])}; every row needs an id of its "
              "own (column 'id', or 'extra_info.index')")
        seen[row["id"]] = number
        messages = () if isinstance(row["prompt"], str) else tuple(row["prompt"])
        ids = _encoded(name, row["prompt"], messages, tokenizer, chat)
        _need(0 < len(ids) <= limit, f"{name}: the prompt has {len(ids)} tokens; it must have 1 to {limit}, so that "
              "the answer fits behind it (engine.max_length - sampling.max_tokens)")
        out.append(Prompt(id=str(row["id"]), tokens=np.array(ids, np.int32), answer=row["answer"], source=row["source"],
                          messages=messages, extra=row.get("extra", {})))
    return tuple(out)


def _encoded(name: str, prompt: str | Sequence, messages: tuple, tokenizer: Tokenizer, chat: Chat | None) -> list[int]:
    _need(not messages or chat is not None, f"{name}: the prompt is a list of messages, but the tokenizer has no chat "
          "template; add chat_template.jinja beside it, or give the prompt as a text")
    try:
        return tokenizer.encode(chat.render(messages), special=False) if messages else tokenizer.encode(prompt)
    except ValueError as error:
        raise ValueError(f"{name}: {error}") from error


def _need(condition: bool, sentence: str) -> None:
    if not condition:
        raise ValueError(sentence)
