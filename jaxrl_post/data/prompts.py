"""Prompts: rows of a file or of a procedural task, as token ids, in an order that is a function of the position.

A row is {id, prompt, answer, source, extra}, from a file {where} too; `prompt` is a text or a list of {role, content}.
Which prompt stands at a position depends on (seed, epoch, index in the epoch) alone: the scheduler's cursor is the
whole state, on every host. Refused, each with file, line and column: a row without its columns, an id that comes twice,
a prompt over the limit, unless such prompts are dropped or cut.

A `Mixture` has several sources in one endless order, each with a weight; grain says which source stands at a position. Each
source is shuffled by itself and begins anew when it is through, so a small one is seen more often. Which prompt stands at a
position depends on (seed, names, sizes, weights, position) alone. So a resumed run goes on exactly.
"""

from __future__ import annotations

import copy
import hashlib
import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grain
import numpy as np

from jaxrl_post.data import files, tasks
from jaxrl_post.data.chat import Chat
from jaxrl_post.data.columns import Columns
from jaxrl_post.data.tokenizer import Tokenizer
from jaxrl_post.ring.json_text import of_hub, said, shown
from jaxrl_post.ring.types import Prompt

_TASK = "task:"
_ENDLESS = 1 << 48  # positions of a source; no run reaches them
REFUSE, DROP, CUT = "refuse", "drop", "cut"


class Prompts:
    """Random access by position; each epoch is a permutation of its own (grain MapDataset), or file order.

    `name`: what tells the order from that of another source under the same seed.
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
        return len(self._prompts)

    def __iter__(self) -> Iterator[Prompt]:
        """The prompts of an epoch, in the data's order."""
        return iter(self._prompts)

    def at(self, position: int) -> tuple[int, Prompt]:
        """(epoch, prompt) at a position counted from 0 over all epochs."""
        position = self._detour.get(position, position)
        return position // len(self._prompts), self._prompts[int(self._order[position])]


class Mixture(Prompts):
    """Prompts of several sources. The epoch of a prompt is that of its own source.

    Among the first N positions, a source with share w of the weights has N * w prompts, up to one. grain rounds weights: the
    smallest one counts as 100, and the others are cut to whole numbers beside it.

    Args:
      parts: the prompts of each source, by its name. Ids are unique over all of them.
      weights: one for each source, above 0.
      seed: of the run.
    """

    def __init__(self, parts: Mapping[str, Sequence[Prompt]], weights: Sequence[float], seed: int):
        super().__init__([prompt for part in parts.values() for prompt in part], seed)
        self._parts = [Prompts(part, seed, name=name) for name, part in parts.items()]
        places = grain.MapDataset.range(_ENDLESS)
        self._mixed = grain.MapDataset.mix(
            [places.map(lambda place, part=part: (part, int(place))) for part in range(len(self._parts))], weights
        )

    def at(self, position: int) -> tuple[int, Prompt]:
        """Returns the prompt at a position and its epoch, which counts how often its source was through before."""
        part, place = self._mixed[self._detour.get(position, position)]
        return self._parts[part].at(place)


def named(sources: Sequence[str]) -> dict[str, str]:
    """Returns the sources by name: that of a task, or of a file without its ending."""
    out: dict[str, str] = {}
    for source in sources:
        name = source.removeprefix(_TASK) if source.startswith(_TASK) else Path(source).stem
        if name in out:
            raise ValueError(
                f"data.sources: {shown(out[name])} and {shown(source)} are both called {shown(name)}, which begins the ids of "
                "their prompts; rename one of the files"
            )
        out[name] = source
    return out


def labelled(name: str, rows: Sequence[Mapping]) -> list[dict]:
    """Returns the rows of a source with ids of their own: `name`/ID. A row without a source gets the name as its source."""
    return [{**row, "id": f"{name}/{row['id']}", "source": row["source"] or name} for row in rows]


def rows(
    source: str, *, seed: int, split: str, size: int, arguments: Mapping | None = None, columns: Columns = Columns()
) -> list[dict]:
    """The rows of `source`: a file's path, read by `columns`, or "task:NAME" with seed, split ("train", "eval"), size,
    arguments.
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


def row(where: str, given: Any, columns: Columns) -> dict:
    return columns.row(where, given)


def read(path: str | Path, columns: Columns = Columns(), each: Callable[[str, Any, Columns], dict] = row) -> list[dict]:
    """Returns the rows of a JSONL or Parquet file, as `each` reads one object of it."""
    if not Path(path).is_file():
        raise ValueError(
            f"data: there is no file {path}{of_hub(path)}; write a path of a JSONL or Parquet file, or task:NAME with "
            f"NAME one of {', '.join(sorted(tasks.TASKS))}"
        )
    return [each(where, given, columns) for where, given in files.objects(path)]


@dataclass(kw_only=True)
class Overlong:
    """What becomes of prompts over the limit: refused, dropped, or cut. What was dropped or cut is counted and named.

    `cut` keeps the right end of a prompt, as verl's data.truncation=left does. What stands in front is lost, for example a
    BOS or a system message.

    `places`: the prompts that were dropped or cut so far, each by its place in the data.
    """

    mode: str = REFUSE
    places: list[str] = field(default_factory=list)

    def fitted(self, place: str, text: str, tokenizer: Tokenizer, special: bool, limit: int) -> list[int]:
        """Returns the token ids of a prompt, 1 to `limit` of them; none of a prompt that is dropped.

        Tokenising needs hundreds of bytes for a character, so a text that cannot fit is never tokenised whole. Twice the
        characters that `limit` tokens can have are enough to cut it.

        `special`: whether the tokenizer adds its BOS. `limit`: most tokens a prompt may have.
        """
        most = limit * tokenizer.longest
        if self.mode == REFUSE:
            measured("the prompt", text, tokenizer, limit)
        long = len(text) > most
        ids = (
            [] if long and self.mode == DROP else tokenizer.encode(text[-2 * most :] if long else text, special=special)
        )
        if 0 < len(ids) <= limit and not long:
            return ids
        if self.mode == REFUSE or not (ids or long):
            raise ValueError(
                f"the prompt has {len(ids)} tokens; it must have 1 to {limit}, so that a rollout fits behind it "
                "(engine.max_length - sampling.max_tokens); data.overlong says whether such prompts are refused, dropped or cut"
            )
        self.places.append(place)
        return [] if self.mode == DROP else ids[-limit:]

    def words(self, option: str, source: str, limit: int) -> str:
        """Returns one line on what was dropped or cut, or an empty text. `option`: data.train or eval.data."""
        count = len(self.places)
        if not count:
            return ""
        many, done = count > 1, "dropped" if self.mode == DROP else "cut to the last tokens"
        return (
            f"{option}={source}: {count} prompt{'s have' if many else ' has'} more than {limit} tokens and "
            f"{'are' if many else 'is'} {done} (data.overlong={self.mode!r}); the first is {self.places[0]}"
        )


def measured(what: str, text: str, tokenizer: Tokenizer, limit: int) -> None:
    """Refuses a text that has too many characters for `limit` tokens, before it is tokenised."""
    most = limit * tokenizer.longest
    if len(text) > most:
        raise ValueError(
            f"{what} has {len(text)} characters; {limit} tokens of at most {tokenizer.longest} characters hold {most}"
        )


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
