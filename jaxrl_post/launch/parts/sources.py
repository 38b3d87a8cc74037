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
from jaxrl_post.data import chat, duplicates, files, preferences, prompts, supervised, tasks
from jaxrl_post.data import tokenizer as tokenizers
from jaxrl_post.data.columns import COMPLETION, Columns
from jaxrl_post.data.prompts import DROP, Overlong
from jaxrl_post.launch.parts.python_inputs import PythonInputs
from jaxrl_post.ring.json_text import shown
from jaxrl_post.ring.types import Prompt, RolloutId


@dataclass(frozen=True, kw_only=True)
class LoadedPrompts:
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

    @property
    def ids(self) -> set[str]:
        """Returns the ids of the prompts, as their sources have them."""
        return {prompt.id.partition("/")[2] if self.sizes else prompt.id for prompt in self.prompts}

    def ordered(self, config: Config) -> prompts.Prompts:
        """Returns the training prompts in the order of the run."""
        if not self.sizes:
            return prompts.Prompts(self.prompts, config.seed)
        left = iter(self.prompts)
        parts = {name: tuple(itertools.islice(left, size)) for name, size in self.sizes.items()}
        return prompts.Mixture(parts, config.data.weights or [1.0] * len(parts), config.seed)


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


@dataclass(frozen=True, kw_only=True)
class Sources:
    """What reads the prompts of a run. Every method raises ValueError for a bad row, and where there are no prompts at all.

    `handed`: what a Python program gave. `begins`: gives rows the messages with which their conversations begin.
    """

    config: Config
    tokenizer: tokenizers.Tokenizer
    chat: chat.Chat | None
    handed: PythonInputs
    begins: Callable[[list[dict]], list[dict]]

    def train(self) -> LoadedPrompts:
        """Returns the training prompts."""
        data = self.config.data
        if data.sources:
            return self._mixed()
        if self.config.engine.name != "rows":
            return self._written(
                Wanted(option="data.train", source=data.train, split="sft", size=data.size, arguments=data.task)
            )
        return self._fitted(
            "data.train", data.train, self.begins(self._rows(data.train, "train", data.size, data.task))
        )

    def _mixed(self) -> LoadedPrompts:
        """Returns the training prompts of all data.sources, one source after the other."""
        parts = {}
        for name, source in prompts.named(self.config.data.sources).items():
            rows = self.begins(prompts.labelled(name, self._rows(source, "train", self.config.data.size, {})))
            parts[name] = self._fitted("data.sources", source, rows)
        return LoadedPrompts(
            prompts=tuple(prompt for part in parts.values() for prompt in part.prompts),
            notes=tuple(note for part in parts.values() for note in part.notes),
            overlong=sum(part.overlong for part in parts.values()),
            sizes={name: len(part.prompts) for name, part in parts.items()},
        )

    def held_out(self) -> LoadedPrompts:
        """Returns the prompts of evaluation: the first eval.prompts of its source, or all where it has fewer."""
        data, size = self.config.data, self.config.eval.prompts
        if size == 0:
            return LoadedPrompts()
        source = self._eval_source("eval.prompts")
        if self.config.eval.data or not data.sources:
            rows = self._rows(source, "eval", size, self.config.eval.task or data.task)
        else:  # of several tasks in turn
            each = -(-size // len(data.sources))
            parts = [self._rows(task, "eval", each, {}) for task in data.sources]
            rows = [row for some in zip(*parts, strict=True) for row in some]
        # What is dropped makes room for later rows.
        few = rows if data.overlong == DROP or data.duplicates == duplicates.DROP else rows[:size]
        found = self._fitted("eval.data", source, self.begins(few))
        fewer = f"eval.prompts={size}: {source} has {len(found.prompts)}, and all of them are used"
        notes = (*found.notes, *([fewer] if len(found.prompts) < size else []))
        return LoadedPrompts(prompts=found.prompts[:size], notes=notes, overlong=found.overlong)

    def completions(self) -> LoadedPrompts:
        """Returns held-out completions, as those of training are: the first eval.completions of eval.data, or of the task.

        A task writes them to problems of its held-out split.
        """
        config, size = self.config, self.config.eval.completions
        if size == 0:
            return LoadedPrompts()
        solves = config.engine.name == "demonstrations"
        source = self._eval_source("eval.completions")
        rows = Wanted(
            option="eval.data",
            source=source,
            split="eval-sft" if solves else "eval",
            size=size,
            arguments=config.eval.task or config.data.task,
            most=size,
        )
        found = self._written(rows)
        if source.startswith("task:") and solves:
            ids = [RolloutId(config.seed, "eval", 0, prompt.id, 0) for prompt in found.prompts]
            taught = {
                prompt.id: solved(source, prompt, id.seed(), self.tokenizer)
                for prompt, id in zip(found.prompts, ids, strict=True)
            }
            for id, tokens in taught.items():
                supervised.check_length(id, len(tokens), config.sampling.max_tokens, source)
            found = dataclasses.replace(found, taught=taught)
        fewer = f"eval.completions={size}: {source} has {len(found.prompts)}, and all of them are used"
        return dataclasses.replace(found, notes=(*found.notes, *([fewer] if len(found.prompts) < size else [])))

    def _eval_source(self, option: str) -> str:
        """eval.data, else the training tasks themselves, which draw their held-out prompts apart."""
        data, given = self.config.data, self.config.eval.data
        files = [source for source in data.sources if not source.startswith("task:")]
        if not given and files:
            raise ValueError(
                f"eval.data is empty and {shown(files[0])} of data.sources is a file: name a file of held-out prompts, or set "
                f"{option}=0"
            )
        if not given and data.sources:
            return ", ".join(data.sources)
        if not given and not data.train.startswith("task:"):
            raise ValueError(
                f"eval.data is empty and data.train={data.train!r} is a file: name a file of held-out "
                f"prompts, or set {option}=0"
            )
        return given or data.train

    # ---- Prompts, of which rollouts are sampled

    def _rows(self, source: str, split: str, size: int, arguments: Mapping) -> list[dict]:
        how, given = columns(self.config), self.handed.sources.get(source)
        if self.config.engine.name == "demonstrations" and not source.startswith("task:"):
            return supervised.questions(self._supervised(source, supervised.row))
        if given is None:
            return prompts.rows(source, seed=self.config.seed, split=split, size=size, arguments=arguments, columns=how)
        return handed_rows(source, given, how.row)

    def _fitted(self, option: str, source: str, rows: list[dict]) -> LoadedPrompts:
        """Returns prompts within the limit. What becomes of others is for data.overlong to say."""
        _check_rows(option, source, rows)
        config, mode = self.config, self.config.data.overlong
        rows, notes = duplicates.settled(rows, config.data.duplicates, option, source)
        limit, overlong = config.engine.max_length - config.sampling.max_tokens, Overlong(mode=mode)
        found = prompts.tokenised(rows, self.tokenizer, chat=self.chat, limit=limit, where=source, overlong=overlong)
        if not found:
            raise ValueError(
                f"{option}={source}: all {len(rows)} prompts have more than {limit} tokens (engine.max_length - "
                f"sampling.max_tokens), and data.overlong={mode!r} leaves none"
            )
        told = overlong.words(option, source, limit)
        return LoadedPrompts(prompts=found, notes=(*notes, *([told] if told else [])), overlong=len(overlong.places))

    # ---- Prompts with what is trained on behind them

    def _written(self, wanted: Wanted) -> LoadedPrompts:
        """Returns written completions. Solutions of a task are left to the one who knows their seeds."""
        if not self.tokenizer.eos_ids:
            raise ValueError(
                "engine.name='demonstrations' and 'preferences' need a tokenizer with an end token, to close each completion with"
            )
        if self.config.engine.name == "preferences":
            return self._pairs(wanted)
        if wanted.source.startswith("task:"):
            return self._fitted(wanted.option, wanted.source, self._made(wanted))
        return self._turns(wanted) if self.config.data.assistant_only_loss else self._one_completion(wanted)

    def _one_completion(self, wanted: Wanted) -> LoadedPrompts:
        """Returns rows of which one completion is trained on."""
        rows, notes = self._read(wanted, supervised.row)
        left: dict[str, str] = {}
        found, taught = supervised.tokenised(rows, self.tokenizer, **self._fits(wanted), left=left)
        notes += supervised.said_of(left, wanted.option, wanted.source, len(rows), self.chat)
        return LoadedPrompts(prompts=found, taught=taught, notes=notes)

    def _turns(self, wanted: Wanted) -> LoadedPrompts:
        """Returns conversations of which every assistant's turn is trained on."""
        rows, notes = self._read(wanted, supervised.conversation_row)
        found, taught = supervised.tokenised_conversations(rows, self.tokenizer, **self._fits(wanted))
        ends = self.tokenizer.eos_ids
        turns, endless = supervised.without_end(taught.values(), ends)
        if endless:
            notes += (
                f"{wanted.option}={wanted.source}: {endless} of {turns} turns of the assistant are trained on without an end token "
                f"(ids {list(ends)}), so they do not teach the policy to stop: put {{% endgeneration %}} of the chat template "
                "behind the token that ends a turn",
            )
        return LoadedPrompts(
            prompts=found,
            taught={id: one.tokens for id, one in taught.items()},
            trained={id: one.trained for id, one in taught.items()},
            notes=notes,
        )

    def _pairs(self, wanted: Wanted) -> LoadedPrompts:
        """Returns prompts with a chosen and a rejected completion each."""
        notes: tuple[str, ...] = ()
        if wanted.source.startswith("task:"):
            rows = preferences.of_task(self._made(wanted), _task(wanted.source), wanted.source)
        else:
            rows, notes = self._read(wanted, preferences.row)
        if self.config.algorithm.trains_reward_model:
            preferences.check_margins(rows)
        left: dict[str, str] = {}
        found, pairs = preferences.tokenised(rows, self.tokenizer, **self._fits(wanted), left=left)
        notes += supervised.said_of(left, wanted.option, wanted.source, len(rows), self.chat)
        return LoadedPrompts(prompts=found, pairs=pairs, notes=notes)

    def _fits(self, wanted: Wanted) -> dict[str, Any]:
        """Returns how rows become tokens: the limits of a prompt and of what is behind it."""
        most = self.config.sampling.max_tokens
        return dict(chat=self.chat, limit=self.config.engine.max_length - most, most=most, where=wanted.source)

    def _made(self, wanted: Wanted) -> list[dict]:
        """Returns the rows of a procedural task."""
        return prompts.rows(
            wanted.source, seed=self.config.seed, split=wanted.split, size=wanted.size, arguments=wanted.arguments
        )

    def _read(self, wanted: Wanted, each: Callable[[str, Any, Columns], dict]) -> tuple[list[dict], tuple[str, ...]]:
        """Returns the rows of completions of a file, or handed over, and a line on duplicates."""
        rows = self._supervised(wanted.source, each)
        rows, notes = duplicates.settled(rows, self.config.data.duplicates, wanted.option, wanted.source)
        _check_rows(wanted.option, wanted.source, rows)
        return rows[: wanted.most], notes

    def _supervised(self, source: str, each: Callable[[str, Any, Columns], dict]) -> list[dict]:
        """Rows of supervised training, of a file or handed over, as `each` reads them."""
        how, given = columns(self.config), self.handed.sources.get(source)
        if given is None:
            return prompts.read(source, how, each)
        return handed_rows(source, given, functools.partial(each, columns=how))


def solved(source: str, prompt: Prompt, seed: np.ndarray, tokenizer: tokenizers.Tokenizer) -> list[int]:
    """Returns the tokens of a procedural task's own solution, closed by an end token."""
    return [*tokenizer.encode(_task(source).demonstrate(prompt.extra, seed), special=False), tokenizer.eos_ids[0]]


def _task(source: str) -> tasks.Task:
    return tasks.TASKS[source.removeprefix("task:")]


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


def handed_rows(source: str, given: Sequence[Any], read: Callable[[str, Any], dict]) -> list[dict]:
    """Returns the rows that a program gave, each as `read(place, row)` reads it."""
    places = [(f"{source}, row {number}", row) for number, row in enumerate(given, start=1)]
    return [read(place, files.plain(place, row)) for place, row in places]


def _check_rows(option: str, source: str, rows: list[dict]) -> None:
    if not rows:
        raise ValueError(f"{option}={source} has no rows: give at least one")
