"""What a run left, for a Python program: metrics as columns, rollouts as rows, and where the policy lies."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from jaxrl_post.data.continuations import Decode
from jaxrl_post.ring.types import Group
from jaxrl_post.runs import metric_rows, rollout_log


@dataclass(frozen=True, kw_only=True)
class Trained:
    """A run that has ended. Everything is read from its folder.

    `folder`: of the run. `logs`: of this process, the same unless there are several. `policy`: the trained policy as a
    Hugging Face directory.
    """

    folder: Path
    logs: Path
    policy: Path
    decode: Decode = field(repr=False)

    @cached_property
    def rows(self) -> list[dict[str, float]]:
        """Returns the rows of metrics.jsonl, in order: of each optimizer step, and of each evaluation."""
        return metric_rows.read(self.logs / "metrics.jsonl")

    @cached_property
    def metrics(self) -> dict[str, list[float]]:
        """Returns the metrics of optimizer steps as columns, name -> values; NaN where a step has no value.

        The column "step" counts steps from 1.
        """
        return columns([row for row in self.rows if metric_rows.is_of_step(row)])

    @cached_property
    def evaluations(self) -> dict[str, list[float]]:
        """Returns the metrics of evaluations as columns. The column "step" has the step after which each was made."""
        return columns([row for row in self.rows if not metric_rows.is_of_step(row)])

    @cached_property
    def rollouts(self) -> list[dict[str, Any]]:
        """Returns a row for each rollout that was trained on; see `rows_of`."""
        files = sorted((self.logs / "rollouts").glob("step_*.npz"))
        steps = [int(file.stem.removeprefix("step_")) for file in files]
        return [row for step, file in zip(steps, files) for row in rows_of(step, rollout_log.read(file), self.decode)]


def columns(rows: Sequence[Mapping[str, float]]) -> dict[str, list[float]]:
    """Returns rows as columns of one length, "step" first."""
    names = ["step", *sorted({name for row in rows for name in row} - {"step"})]
    return {name: [row.get(name, math.nan) for row in rows] for name in names}


def rows_of(step: int, groups: Sequence[Group], decode: Decode) -> list[dict[str, Any]]:
    """Returns a row for each rollout of a step.

    - step, prompt_id, sample, epoch, attempt
    - prompt (text, or messages), source, answer, and columns: the other columns of the data
    - text, tokens (int32[T]), logprobs (f32[T]), versions (int32[T]), finish
    - reward (None where unscored) and components
    """
    return [
        {
            "step": step,
            "prompt_id": group.prompt.id,
            "sample": rollout.id.sample,
            "epoch": rollout.id.epoch,
            "attempt": rollout.id.attempt,
            "prompt": list(group.prompt.messages) or decode(group.prompt.tokens),
            "source": group.prompt.source,
            "answer": group.prompt.answer,
            "columns": dict(group.prompt.extra),
            "text": decode(rollout.tokens, before=rollout.prompt.tokens),
            "tokens": rollout.tokens,
            "logprobs": rollout.logprobs,
            "versions": rollout.versions,
            "finish": rollout.finish.value,
            "reward": float(group.rewards[place]) if group.scored[place] else None,
            "components": {
                name: float(values[place]) for name, values in group.components.items() if not np.isnan(values[place])
            },
        }
        for group in groups
        for place, rollout in enumerate(group.rollouts)
    ]
