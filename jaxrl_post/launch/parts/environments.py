"""The environment of a run: the prompts that it begins with, what plays it, and its scores."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

from jaxrl_post.config import Config
from jaxrl_post.data.chat import Chat
from jaxrl_post.data.messages import TOOLS
from jaxrl_post.data.turns import Wording
from jaxrl_post.launch.parts.python_inputs import PythonInputs
from jaxrl_post.parallel.processes import say
from jaxrl_post.rewards.environments import HARNESS, harness, path_of
from jaxrl_post.rewards.environments.conversations import Conversations, EnvironmentHost, Log, TurnScores
from jaxrl_post.rewards.environments.pool import EnvironmentPool
from jaxrl_post.rewards.printed import Printed
from jaxrl_post.runs.journal import Journal, read_aside

Begins = Callable[[list[dict]], list[dict]]


@contextlib.contextmanager
def first_messages(config: Config, template: Chat | None, handed: PythonInputs) -> Iterator[tuple[Chat | None, Begins]]:
    """Yields the chat template with the environment's tools, and what gives rows their first messages.

    Raises:
      ValueError: an environment without a chat template, or one that cannot be loaded.
    """
    if not config.environment.name:
        yield template, lambda rows: rows
        return
    if template is None:
        raise ValueError(
            f"environment.name={config.environment.name!r} needs a chat template: add chat_template.jinja beside the "
            "tokenizer"
        )
    if config.environment.name == HARNESS:
        tools = harness.read(config.environment.arguments).tools
        yield _with(template, tools), functools.partial(_begin, harness.reset, bool(tools))
        return
    with started(config, handed, None, workers=1) as pool:
        yield _with(template, pool.tools), functools.partial(_begin, pool.reset, bool(pool.tools))


def _with(template: Chat, tools: Sequence[Mapping]) -> Chat:
    """Returns the template with the tools of an environment."""
    return dataclasses.replace(template, arguments={**template.arguments, TOOLS: list(tools)})


def _begin(reset: Callable[[Mapping], list[dict]], tools: bool, rows: list[dict]) -> list[dict]:
    """Returns rows whose prompts are the messages of `reset`. The prompt of the row itself becomes a further column.

    Args:
      tools: whether the environment has tools.

    Raises:
      ValueError: a row has other tools than its environment.
    """
    out = []
    for row in rows:
        if tools and TOOLS in row.get("arguments", {}):
            raise ValueError(
                f"{row.get('where', row['id'])}: has the column {TOOLS!r}, and the environment has tools of its own; leave the "
                "column out"
            )
        extra = {"prompt": row["prompt"]} | dict(row.get("extra", {}))
        own = {"id": str(row["id"]), "answer": row["answer"], "source": row["source"]}
        out.append(dict(row) | {"prompt": reset(extra | own), "extra": extra})
    return out


def started(config: Config, handed: PythonInputs, printed: Printed | None, workers: int) -> EnvironmentPool:
    """Starts the processes that play the run's environment.

    Raises:
      ValueError: there is no such environment, or it cannot be loaded.
    """
    about = config.environment
    path = about.name if about.name in handed.code else path_of(about.name)
    return EnvironmentPool(
        path,
        about.arguments,
        workers=workers,
        timeout_s=about.timeout_s,
        code=handed.code.get(about.name, ""),
        printed=printed,
    )


def scores(
    config: Config,
    start: Any,
    share: Callable[[np.ndarray], np.ndarray] | None,
    mine: Path,
    stack: contextlib.ExitStack,
) -> tuple[TurnScores, TurnScores]:
    """Starts what plays the environment, and returns what scores training and evaluation.

    In a job of several processes, process 0 plays and shares what it finds by `share`.
    """
    pool: EnvironmentHost | None = None
    if jax.process_index() == 0 and config.environment.name != HARNESS:
        printed = Printed(mine / "rewards.log")
        pool = stack.enter_context(started(config, start.handed, printed, config.environment.workers))
    elif jax.process_index() == 0:
        if start.handed.endpoint is None:
            raise ValueError(
                f"environment.name={HARNESS!r} needs an endpoint, which python -m jaxrl_post.main and jaxrl_post.train open"
            )
        pool = stack.enter_context(start.handed.endpoint(config, start.tokenizer))
    files = {"train": mine / "rewards.jsonl", "eval": mine / "eval_rewards.jsonl"}
    conversations = Conversations(
        pool,
        Wording(start.chat, start.tokenizer),
        parser=config.environment.tool_calls,
        max_turns=config.environment.max_turns,
        max_s=config.environment.max_s,
        logs={purpose: _log(file, stack) for purpose, file in files.items()},
        share=share,
    )
    shuffled = config.seed if config.reward.shuffle else None
    return TurnScores(conversations, "train", shuffled), TurnScores(conversations, "eval")


def _log(file: Path, stack: contextlib.ExitStack) -> Log:
    """Opens the journal of turns, with the turns behind the point of a resume."""
    journal, before = Journal(file), read_aside(file)
    stack.callback(journal.close)
    if len(before):
        say(f"resume: {len(before)} turns of {file.name} after that point are used again, not asked for again")
    return Log(journal, before)
