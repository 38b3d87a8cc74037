"""python -m jaxrl_post rollouts RUN [--step=A[:B]] [--prompt=TEXT] [--source=NAME] [--min-reward=X] [--max-reward=X]
  [--purpose=train|eval] [--limit=N] [--json] [--parquet=FILE]

Prints rollouts from the logs of a run, oldest first.

The name in front of each is what `replay RUN --rollout=NAME` takes.
"""

from __future__ import annotations

import argparse
import difflib
import itertools
import json
import os
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from jaxrl_post.commands.arguments import Command
from jaxrl_post.config import refuse_url
from jaxrl_post.config.command_line import Flag, number, span, whole
from jaxrl_post.data.continuations import Decode
from jaxrl_post.ring.json_text import shown
from jaxrl_post.ring.types import Group, Rollout
from jaxrl_post.runs import run_logs

SHOWN = 20  # rollouts on a screen
_TOGETHER = 4096  # rows of a part of a Parquet file

_FLAGS = (
    Flag("RUN", "a run's folder"),
    Flag(
        "--step=A[:B]",
        "those of optimizer step A, or of steps A to B; of evaluations, the steps at which they ran",
        span,
        (0, None),
    ),
    Flag("--prompt=TEXT", "those of the prompt with this id, and of prompts whose text contains it", default=None),
    Flag("--source=NAME", "those of one source of the data", default=None),
    Flag("--min-reward=X", "those with at least this reward; those without a score are left out", number, None),
    Flag("--max-reward=X", "those with at most this reward; those without a score are left out", number, None),
    Flag("--purpose=WHAT", "train (the default) or eval", default="train", choices=tuple(run_logs.FOLDERS)),
    Flag("--limit=N", "at most N; 20 without --json or --parquet, and else all", whole(1), None),
    Flag("--json", "one object a line"),
    Flag("--parquet=FILE", "writes a new Parquet file, which needs pyarrow"),
)


def _print(flags: argparse.Namespace) -> int:
    refuse_url(flags.parquet, "--parquet")
    if flags.json and flags.parquet:
        raise ValueError("rollouts: --json and --parquet are two forms: name one")
    if flags.min_reward is not None and flags.max_reward is not None and flags.min_reward > flags.max_reward:
        raise ValueError(f"rollouts: --min-reward={flags.min_reward:g} is above --max-reward={flags.max_reward:g}")
    logs = run_logs.opened(flags.run)
    _check_names(logs, flags)
    machine = flags.json or bool(flags.parquet)
    found = itertools.islice(
        rows(logs, flags, run_logs.tokenizer_of(logs).decode), flags.limit or (None if machine else SHOWN)
    )
    if flags.parquet:
        print(f"{write_parquet(Path(flags.parquet), found)} rollouts in {flags.parquet}")
        return 0
    count = 0
    for row in found:
        print(json.dumps(row, ensure_ascii=False) if flags.json else text(row))
        count += 1
    if not flags.json:
        more = "; --limit=N shows more" if count == SHOWN and not flags.limit else ""
        print(f"{count} rollouts{more}")
    return 0


main = Command("rollouts", __doc__, _FLAGS, _print)


def _check_names(logs: run_logs.RunLogs, flags: argparse.Namespace) -> None:
    """Refuses steps, sources and a file that cannot be right."""
    there = logs.steps(flags.purpose)
    first, last = flags.step
    if not there:
        raise ValueError(f"{logs.folder} has logged no {run_logs.FOLDERS[flags.purpose]} yet")
    if not any(first <= step and (last is None or step <= last) for step in there):
        near = min(there, key=lambda step: min(abs(step - end) for end in flags.step))
        raise ValueError(
            f"--step={first}:{last}: {logs.folder} has logged {run_logs.FOLDERS[flags.purpose]} of {len(there)} steps "
            f"from {there[0]} to {there[-1]}; nearest is {near}"
        )
    if flags.parquet and Path(flags.parquet).exists():
        raise ValueError(f"--parquet={flags.parquet} exists already and is not written over; name a new file")
    if flags.source is not None:
        known = sorted({group.prompt.source for group in logs.groups(flags.purpose, there[-1])})
        known += [] if flags.source in known else _sources(logs, flags.purpose)
        if flags.source not in known:
            near = difflib.get_close_matches(flags.source, known, n=1, cutoff=0.0)
            raise ValueError(f"--source={shown(flags.source)}: no rollout has it; nearest is {shown(near[0])}")


def _sources(logs: run_logs.RunLogs, purpose: str) -> list[str]:
    """Returns the sources of all logged rollouts."""
    return sorted({group.prompt.source for _, group in run_logs.groups_of(logs, purpose)})


def rows(logs: run_logs.RunLogs, flags: argparse.Namespace, decode: Decode) -> Iterator[dict]:
    """Yields the rollouts that the flags choose, as plain values."""
    for step, group in run_logs.groups_of(logs, flags.purpose, *flags.step):
        prompt = decode(group.prompt.tokens)
        if flags.source is not None and group.prompt.source != flags.source:
            continue
        if flags.prompt is not None and flags.prompt != group.prompt.id and flags.prompt not in prompt:
            continue
        for place in range(len(group.rollouts)):
            if _within(flags, group, place):
                yield _row(step, group, place, prompt, decode)


def _within(flags: argparse.Namespace, group: Group, place: int) -> bool:
    """Returns whether a rollout's reward is within the bounds, if there are any."""
    low, high = flags.min_reward, flags.max_reward
    reward = float(group.rewards[place])
    asked = low is not None or high is not None
    return not asked or (
        bool(group.scored[place]) and (low is None or reward >= low) and (high is None or reward <= high)
    )


def _row(step: int, group: Group, place: int, prompt: str, decode: Decode) -> dict:
    rollout, scored = group.rollouts[place], bool(group.scored[place])
    sampled = rollout.versions[rollout.sampled]
    parts = {name: float(values[place]) for name, values in group.components.items()}
    return {
        "rollout": str(run_logs.name_of(rollout.id, step)),
        "purpose": rollout.id.purpose,
        "step": step,
        "prompt_id": group.prompt.id,
        "epoch": rollout.id.epoch,
        "sample": rollout.id.sample,
        "attempt": rollout.id.attempt,
        "source": group.prompt.source,
        "prompt": prompt,
        "answer": group.prompt.answer,
        "text": decode(rollout.tokens, before=group.prompt.tokens),
        "spans": spans(rollout, decode),
        "reward": float(group.rewards[place]) if scored else None,
        "components": {name: value for name, value in sorted(parts.items()) if scored and value == value},
        "finish": rollout.finish.value,
        "num_tokens": len(rollout),
        "num_prompt_tokens": int(group.prompt.tokens.size),
        "first_version": int(sampled[0]) if sampled.size else None,
        "last_version": int(sampled[-1]) if sampled.size else None,
        "num_versions": int(np.unique(sampled).size),
        "drafted_share": float(rollout.drafted.mean()) if len(rollout) else 0.0,
        "mean_logprob": float(rollout.logprobs[rollout.sampled].astype(np.float64).mean()) if sampled.size else None,
    }


def spans(rollout: Rollout, decode: Decode) -> list[dict]:
    """Returns the runs of sampled and of observed tokens, each with its text, special tokens included."""
    every, start = np.concatenate([rollout.prompt.tokens, rollout.tokens]), rollout.prompt.tokens.size
    edges = [0, *(np.flatnonzero(np.diff(rollout.sampled)) + 1).tolist(), len(rollout)]
    return [
        {
            "sampled": bool(rollout.sampled[begin]),
            "text": decode(rollout.tokens[begin:end], skip_special=False, before=every[: start + begin]),
        }
        for begin, end in itertools.pairwise(edges)
        if begin < end
    ]


def text(row: dict) -> str:
    """Returns a row as a few lines."""
    reward = "no score" if row["reward"] is None else f"reward {row['reward']:g}"
    parts = [f"{name} {value:g}" for name, value in row["components"].items()]
    first, last = row["first_version"], row["last_version"]
    weights = (
        [] if first is None else [f"weights {first}" if row["num_versions"] == 1 else f"weights {first} to {last}"]
    )
    drafted = [f"drafted {row['drafted_share']:.2f}"] if row["drafted_share"] else []
    facts = [f"step {row['step']}", reward, *parts, f"ends by {row['finish']}", f"{row['num_tokens']} tokens"]
    several = len(row["spans"]) > 1
    names = ["sampled  " if one["sampled"] else "observed " for one in row["spans"]] if several else ["text    "]
    texts = [one["text"] for one in row["spans"]] or [""]
    return "\n".join(
        [
            f"{row['rollout']}   {', '.join([*facts, *weights, *drafted])}",
            f"  prompt  {row['prompt']!r}   answer {row['answer']!r}",
            *(f"  {name}{text!r}" for name, text in zip(names, texts, strict=True)),
        ]
    )


def write_parquet(file: Path, found: Iterator[dict]) -> int:
    """Writes rows to a new Parquet file, whole or not at all, and returns how many.

    Raises:
      ValueError: pyarrow is missing.
    """
    try:
        import pyarrow
        import pyarrow.parquet
    except ModuleNotFoundError as error:
        if error.name != "pyarrow":
            raise
        raise ValueError("--parquet needs pyarrow: pip install 'jaxrl_post[parquet]', or use --json") from None
    schema = pyarrow.schema([(name, getattr(pyarrow, kind)()) for name, kind in _COLUMNS.items()]).append(
        pyarrow.field("components", pyarrow.map_(pyarrow.string(), pyarrow.float64()))
    )
    schema = schema.append(
        pyarrow.field(
            "spans", pyarrow.list_(pyarrow.struct([("sampled", pyarrow.bool_()), ("text", pyarrow.string())]))
        )
    )
    part, count = file.with_name(f"{file.name}.part"), 0
    try:
        with pyarrow.parquet.ParquetWriter(part, schema) as writer:
            while some := list(itertools.islice(found, _TOGETHER)):
                together = [row | {"components": list(row["components"].items())} for row in some]
                writer.write_table(pyarrow.Table.from_pylist(together, schema=schema))
                count += len(some)
        os.replace(part, file)
    finally:
        part.unlink(missing_ok=True)
    return count


_COLUMNS = {  # of a Parquet file, beside the components
    **dict.fromkeys(("rollout", "purpose"), "string"),
    "step": "int64",
    "prompt_id": "string",
    **dict.fromkeys(("epoch", "sample", "attempt"), "int64"),
    **dict.fromkeys(("source", "prompt", "answer", "text"), "string"),
    "reward": "float64",
    "finish": "string",
    **dict.fromkeys(("num_tokens", "num_prompt_tokens", "first_version", "last_version", "num_versions"), "int64"),
    **dict.fromkeys(("drafted_share", "mean_logprob"), "float64"),
}
