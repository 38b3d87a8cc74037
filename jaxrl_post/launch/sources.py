"""Prompts of a run from its files, from procedural tasks, or from a Python program: for training and for evaluation.

Nothing is left out silently: prompts that are dropped or cut, and an evaluation that has fewer than it asks for, are told
in `notes`. Refused: a bad row, and a source without prompts.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from jaxrl_post.config import Config
from jaxrl_post.data import (
    chat,
    conversations,
    duplicates,
    files,
    mixture,
    preferences,
    prompts,
    supervised,
    tasks,
    tokenizer,
)
from jaxrl_post.data.columns import COMPLETION, Columns
from jaxrl_post.data.overlong import DROP, Overlong
from jaxrl_post.json_text import shown
from jaxrl_post.launch.handed import Handed
from jaxrl_post.types import Prompt, RolloutId


@dataclass(frozen=True, kw_only=True)
class Found:
    """Prompts in file order, and what of their data is not used as it is.

    `taught`: of a supervised file the tokens behind the prompt, by prompt id. `trained`: which of them are trained on, where
    not all are. `pairs`: of preferences the chosen and the rejected tokens, by prompt id. `overlong`: prompts that were
    dropped or cut.
    `sizes`: how many prompts are of each source, by its name, in their order; empty where there is one source.
    """

    prompts: tuple[Prompt, ...] = ()
    taught: Mapping[str, list[int]] = field(default_factory=dict)
    trained: Mapping[str, list[bool]] = field(default_factory=dict)
    pairs: Mapping[str, tuple[list[int], list[int]]] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    overlong: int = 0
    sizes: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Wanted:
    """Rows of completions: the option that names their `source`, and of a task its `split`, `size` and `arguments`.

    `most`: of a file, in its order. None: all of them.
    """

    option: str
    source: str
    split: str
    size: int
    arguments: Mapping[str, Any]
    most: int | None = None


def as_they_are(rows: list[dict]) -> list[dict]:
    """Returns the rows, whose prompts begin no conversation with an environment."""
    return rows


def train(
    config: Config,
    words: tokenizer.Tokenizer,
    template: chat.Chat | None,
    handed: Handed,
    begins: Callable[[list[dict]], list[dict]] = as_they_are,
) -> Found:
    """Returns the training prompts. `begins`: gives rows the messages with which their conversations begin.

    Raises:
      ValueError: a bad row, or no prompts at all.
    """
    if config.data.sources:
        return _mixed(config, words, template, handed, begins)
    source, size, arguments = config.data.train, config.data.size, config.data.task
    if config.engine.name != "rows":
        rows = Wanted(option="data.train", source=source, split="sft", size=size, arguments=arguments)
        return _written(config, rows, words, template, handed)
    return _fitted(
        config, "data.train", source, begins(_rows(config, source, "train", size, arguments, handed)), words, template
    )


def _mixed(
    config: Config,
    words: tokenizer.Tokenizer,
    template: chat.Chat | None,
    handed: Handed,
    begins: Callable[[list[dict]], list[dict]],
) -> Found:
    """Returns the training prompts of all data.sources, one source after the other."""
    parts = {}
    for name, source in mixture.named(config.data.sources).items():
        rows = begins(mixture.labelled(name, _rows(config, source, "train", config.data.size, {}, handed)))
        parts[name] = _fitted(config, "data.sources", source, rows, words, template)
    return Found(
        prompts=tuple(prompt for part in parts.values() for prompt in part.prompts),
        notes=tuple(note for part in parts.values() for note in part.notes),
        overlong=sum(part.overlong for part in parts.values()),
        sizes={name: len(part.prompts) for name, part in parts.items()},
    )


def ordered(config: Config, found: Found) -> prompts.Prompts:
    """Returns the training prompts in the order of the run."""
    if not found.sizes:
        return prompts.Prompts(found.prompts, config.seed)
    left = iter(found.prompts)
    parts = {name: tuple(itertools.islice(left, size)) for name, size in found.sizes.items()}
    return mixture.Mixture(parts, config.data.weights or [1.0] * len(parts), config.seed)


def trained_ids(found: Found) -> set[str]:
    """Returns the ids of training prompts, as their sources have them."""
    return {prompt.id.partition("/")[2] if found.sizes else prompt.id for prompt in found.prompts}


def held_out(
    config: Config,
    words: tokenizer.Tokenizer,
    template: chat.Chat | None,
    handed: Handed,
    begins: Callable[[list[dict]], list[dict]] = as_they_are,
) -> Found:
    """Returns the prompts of evaluation: the first eval.prompts of its source, or all where it has fewer.

    `begins`: as in `train`.

    Raises:
      ValueError: a bad row, or no prompts at all.
    """
    size = config.eval.prompts
    if size == 0:
        return Found()
    source = _eval_source(config, "eval.prompts")
    rows = _held_out_rows(config, source, size, handed)
    # What is dropped makes room for later rows.
    few = rows if config.data.overlong == DROP or config.data.duplicates == duplicates.DROP else rows[:size]
    found = _fitted(config, "eval.data", source, begins(few), words, template)
    fewer = f"eval.prompts={size}: {source} has {len(found.prompts)}, and all of them are used"
    notes = (*found.notes, *([fewer] if len(found.prompts) < size else []))
    return Found(prompts=found.prompts[:size], notes=notes, overlong=found.overlong)


def completions(config: Config, words: tokenizer.Tokenizer, template: chat.Chat | None, handed: Handed) -> Found:
    """Returns held-out completions, as those of training are: the first eval.completions of eval.data, or of the task.

    A task writes them to problems of its held-out split.

    Raises:
      ValueError: a bad row, or no rows at all.
    """
    size = config.eval.completions
    if size == 0:
        return Found()
    solves = config.engine.name == "demonstrations"
    source, arguments = _eval_source(config, "eval.completions"), config.eval.task or config.data.task
    rows = Wanted(
        option="eval.data",
        source=source,
        split="eval-sft" if solves else "eval",
        size=size,
        arguments=arguments,
        most=size,
    )
    found = _written(config, rows, words, template, handed)
    if source.startswith("task:") and solves:
        ids = [RolloutId(config.seed, "eval", 0, prompt.id, 0) for prompt in found.prompts]
        taught = {
            prompt.id: solved(source, prompt, id.seed(), words) for prompt, id in zip(found.prompts, ids, strict=True)
        }
        for id, tokens in taught.items():
            supervised.check_length(id, len(tokens), config.sampling.max_tokens, source)
        found = dataclasses.replace(found, taught=taught)
    fewer = f"eval.completions={size}: {source} has {len(found.prompts)}, and all of them are used"
    return dataclasses.replace(found, notes=(*found.notes, *([fewer] if len(found.prompts) < size else [])))


def solved(source: str, prompt: Prompt, seed: np.ndarray, words: tokenizer.Tokenizer) -> list[int]:
    """Returns the tokens of a procedural task's own solution, closed by an end token."""
    return [*words.encode(_task(source).demonstrate(prompt.extra, seed), special=False), words.eos_ids[0]]


def _written(
    config: Config, rows: Wanted, words: tokenizer.Tokenizer, template: chat.Chat | None, handed: Handed
) -> Found:
    """Returns prompts with what is trained on behind them. Solutions of a task are left to the one who knows their seeds."""
    check_closable(words)
    law = config.sampling
    fits = dict(chat=template, limit=config.engine.max_length - law.max_tokens, most=law.max_tokens, where=rows.source)
    if config.engine.name == "preferences":
        return _pairs(config, rows, words, handed, fits)
    if rows.source.startswith("task:"):
        return _fitted(config, rows.option, rows.source, _made(config, rows), words, template)
    return (_turns if config.data.assistant_only_loss else _answers)(config, rows, words, handed, fits)


def _answers(config: Config, wanted: Wanted, words: tokenizer.Tokenizer, handed: Handed, fits: dict[str, Any]) -> Found:
    """Returns rows of which one completion is trained on."""
    rows, notes = _read(config, wanted, handed, supervised.row)
    left: dict[str, str] = {}
    found, taught = supervised.tokenised(rows, words, **fits, left=left)
    notes += supervised.said_of(left, wanted.option, wanted.source, len(rows), fits["chat"])
    return Found(prompts=found, taught=taught, notes=notes)


def _turns(config: Config, wanted: Wanted, words: tokenizer.Tokenizer, handed: Handed, fits: dict[str, Any]) -> Found:
    """Returns conversations of which every assistant's turn is trained on."""
    rows, notes = _read(config, wanted, handed, conversations.row)
    found, taught = conversations.tokenised(rows, words, **fits)
    turns, endless = conversations.without_end(taught.values(), words.eos_ids)
    if endless:
        notes += (
            f"{wanted.option}={wanted.source}: {endless} of {turns} turns of the assistant are trained on without an end token "
            f"(ids {list(words.eos_ids)}), so they do not teach the policy to stop: put {{% endgeneration %}} of the chat template "
            "behind the token that ends a turn",
        )
    return Found(
        prompts=found,
        taught={id: one.tokens for id, one in taught.items()},
        trained={id: one.trained for id, one in taught.items()},
        notes=notes,
    )


def _held_out_rows(config: Config, source: str, size: int, handed: Handed) -> list[dict]:
    """Returns rows for evaluation; those of several tasks in turn."""
    if config.eval.data or not config.data.sources:
        return _rows(config, source, "eval", size, config.eval.task or config.data.task, handed)
    each = -(-size // len(config.data.sources))
    parts = [_rows(config, task, "eval", each, {}, handed) for task in config.data.sources]
    return [row for rows in zip(*parts, strict=True) for row in rows]


def _pairs(config: Config, wanted: Wanted, words: tokenizer.Tokenizer, handed: Handed, fits: dict[str, Any]) -> Found:
    """Returns prompts with a chosen and a rejected completion each."""
    notes: tuple[str, ...] = ()
    if wanted.source.startswith("task:"):
        rows = _made(config, wanted)
        rows = preferences.of_task(rows, _task(wanted.source), wanted.source)
    else:
        rows, notes = _read(config, wanted, handed, preferences.row)
    if config.algorithm.trains_reward_model:
        preferences.check_margins(rows)
    left: dict[str, str] = {}
    found, pairs = preferences.tokenised(rows, words, **fits, left=left)
    notes += supervised.said_of(left, wanted.option, wanted.source, len(rows), fits["chat"])
    return Found(prompts=found, pairs=pairs, notes=notes)


def _task(source: str) -> tasks.Task:
    return tasks.TASKS[source.removeprefix("task:")]


def _made(config: Config, wanted: Wanted) -> list[dict]:
    """Returns the rows of a procedural task."""
    return prompts.rows(
        wanted.source, seed=config.seed, split=wanted.split, size=wanted.size, arguments=wanted.arguments
    )


def columns(config: Config) -> Columns:
    """Returns how files are read.

    Raises:
      ValueError: a column of supervised rows is named where none are read.
    """
    data = config.data
    if COMPLETION in data.columns and config.engine.name != "demonstrations":
        raise ValueError(
            f"data.columns: {COMPLETION}={shown(data.columns[COMPLETION])} is read by engine.name='demonstrations' alone: "
            "another column without a role reaches reward functions under its own name"
        )
    return Columns(
        format=data.format,
        named=data.columns,
        template=data.template,
        source=data.source,
        chat=data.chat,
        system=data.system_prompt,
    )


def _rows(config: Config, source: str, split: str, size: int, arguments: Mapping, handed: Handed) -> list[dict]:
    how, given = columns(config), handed.rows(source)
    if config.engine.name == "demonstrations" and not source.startswith("task:"):
        return supervised.questions(_supervised(source, how, handed, supervised.row))
    if given is None:
        return prompts.rows(source, seed=config.seed, split=split, size=size, arguments=arguments, columns=how)
    return handed_rows(source, given, how.row)


def handed_rows(source: str, given: Sequence[Any], read: Callable[[str, Any], dict]) -> list[dict]:
    """Returns the rows that a program gave, each as `read(place, row)` reads it."""
    places = [(f"{source}, row {number}", row) for number, row in enumerate(given, start=1)]
    return [read(place, files.plain(place, row)) for place, row in places]


def _read(
    config: Config, wanted: Wanted, handed: Handed, each: Callable[[str, Any, Columns], dict]
) -> tuple[list[dict], tuple[str, ...]]:
    """Returns the rows of completions of a file, or handed over, and a line on duplicates."""
    rows = _supervised(wanted.source, columns(config), handed, each)
    rows, notes = duplicates.settled(rows, config.data.duplicates, wanted.option, wanted.source)
    _check_rows(wanted.option, wanted.source, rows)
    return rows[: wanted.most], notes


def _supervised(source: str, how: Columns, handed: Handed, each: Callable[[str, Any, Columns], dict]) -> list[dict]:
    """Rows of supervised training, of a file or handed over, as `each` reads them."""
    given = handed.rows(source)
    if given is None:
        return supervised.read(source, how, each)
    return handed_rows(source, given, functools.partial(each, columns=how))


def _check_rows(option: str, source: str, rows: list[dict]) -> None:
    if not rows:
        raise ValueError(f"{option}={source} has no rows: give at least one")


def _fitted(
    config: Config, option: str, source: str, rows: list[dict], words: tokenizer.Tokenizer, template: chat.Chat | None
) -> Found:
    """Returns prompts within the limit. What becomes of others is for data.overlong to say."""
    _check_rows(option, source, rows)
    rows, notes = duplicates.settled(rows, config.data.duplicates, option, source)
    mode = config.data.overlong
    limit, overlong = config.engine.max_length - config.sampling.max_tokens, Overlong(mode=mode)
    found = prompts.tokenised(rows, words, chat=template, limit=limit, where=source, overlong=overlong)
    if not found:
        raise ValueError(
            f"{option}={source}: all {len(rows)} prompts have more than {limit} tokens (engine.max_length - "
            f"sampling.max_tokens), and data.overlong={mode!r} leaves none"
        )
    told = overlong.words(option, source, limit)
    return Found(prompts=found, notes=(*notes, *([told] if told else [])), overlong=len(overlong.places))


def _eval_source(config: Config, option: str) -> str:
    """eval.data, else the training tasks themselves, which draw their held-out prompts apart."""
    files = [source for source in config.data.sources if not source.startswith("task:")]
    if not config.eval.data and files:
        raise ValueError(
            f"eval.data is empty and {shown(files[0])} of data.sources is a file: name a file of held-out prompts, or set "
            f"{option}=0"
        )
    if not config.eval.data and config.data.sources:
        return ", ".join(config.data.sources)
    if not config.eval.data and not config.data.train.startswith("task:"):
        raise ValueError(
            f"eval.data is empty and data.train={config.data.train!r} is a file: name a file of held-out "
            f"prompts, or set {option}=0"
        )
    return config.eval.data or config.data.train


def check_closable(words: tokenizer.Tokenizer) -> None:
    """Refuses a tokenizer without an end token, which closes every demonstration."""
    if not words.eos_ids:
        raise ValueError(
            "engine.name='demonstrations' and 'preferences' need a tokenizer with an end token, to close each completion with"
        )
