"""Scalars of a run: metrics of a batch of groups, under verl's names, and writers to the console and to a program.

A writer has write(step, row) and close(). A row maps names to floats. This module imports no jax.
"""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import TextIO

import numpy as np
import rich.console
import rich.live
import rich.progress
import rich.table

from jaxrl_post.ring.types import Finish, Group
from jaxrl_post.runs import metric_rows

# heading -> (names, format). The first of these names that the row has is shown.
_Columns = Mapping[str, tuple[tuple[str, ...], str]]
COLUMNS: _Columns = {
    "reward": (("critic/score/mean",), ".4f"),
    "acc": (("reward/acc/mean",), ".4f"),
    "length": (("response_length/mean",), ".1f"),
    "entropy": (("actor/entropy",), ".4f"),
    "loss": (("actor/pg_loss", "actor/loss"), ".5f"),
    "grad": (("actor/grad_norm",), ".4f"),
    "tokens/s": (("perf/throughput",), ".0f"),
    "s": (("timing_s/step",), ".2f"),
}
SUPERVISED: _Columns = {  # of runs whose loss reads no reward
    "loss": (("actor/preference_loss", "actor/pg_loss"), ".4f"),
    "accuracy": (("rewards/accuracies", "rewards/accuracy"), ".4f"),
    "margin": (("rewards/margins", "rewards/margin"), ".4f"),
    "lr": (("actor/lr",), ".3g"),
    "grad": (("actor/grad_norm",), ".4f"),
    "tokens": (("training/trained_tokens",), ",.0f"),
    "tokens/s": (("perf/throughput",), ".0f"),
    "s": (("timing_s/step",), ".2f"),
}
_WRITTEN = ("val/loss", "val/rewards/accuracies", "val/rewards/accuracy")  # of held-out completions
_SHOWN = 12  # rows of the live table


def describe(groups: Sequence[Group], version: int) -> dict[str, float]:
    """Returns metrics of groups that were trained on at weights `version`.

    critic/score and critic/rewards {mean, max, min}: over scored rollouts (equal without KL in the reward).
    reward/mean, reward/NAME/mean: mean of the reward and of each component.
    reward_std: standard deviation within a group, divided by n, averaged over groups. The advantage divides by n - 1.
    frac_reward_zero_std: share of groups whose scored rewards are all equal, as TRL. Groups without a score count too.
    response_length, prompt_length: tokens, with clip_ratio (share cut at the limit) and correct_mean (accuracy above
    0.5).
    data/SOURCE/share, data/SOURCE/score/mean: share of the groups and mean reward of each source, where there are several.
    off_policy/{mean, max}: `version` minus the version of each sampled token. first_token_mean: of each first token.
    off_policy/share_N: share of tokens that are N steps old, if any token is older than 0.

    A figure without values is left out. An unscored rollout never counts as 0.
    """
    rollouts = [rollout for group in groups for rollout in group.rollouts]
    if not rollouts:
        return {}
    scored = np.concatenate([group.scored for group in groups])
    rewards = np.concatenate([group.rewards for group in groups]).astype(np.float64)
    right = np.concatenate([group.accuracies for group in groups]) > 0.5
    lengths = np.array([len(rollout) for rollout in rollouts])
    prompts = np.array([rollout.prompt.tokens.size for rollout in rollouts])
    stale = np.concatenate([version - rollout.versions[rollout.sampled] for rollout in rollouts])
    out = {"training/epoch": float(max(rollout.id.epoch for rollout in rollouts))}
    out |= _spread("critic/score", rewards[scored]) | _spread("critic/rewards", rewards[scored])
    out |= _mean("reward/mean", rewards[scored]) | _components(groups) | _variation(groups)
    out |= _sources(groups)
    out |= _spread("response_length", lengths) | _spread("prompt_length", prompts)
    out["response_length/clip_ratio"] = float(np.mean([rollout.finish is Finish.LENGTH for rollout in rollouts]))
    out |= _mean("response_length/correct_mean", lengths[right & scored])
    out |= {name: value for name, value in _spread("off_policy", stale).items() if not name.endswith("/min")}
    first = [version - rollout.versions[rollout.sampled][0] for rollout in rollouts if rollout.sampled.any()]
    out |= _mean("off_policy/first_token_mean", np.array(first))
    if stale.any():
        out |= {f"off_policy/share_{age}": float(share) for age, share in enumerate(np.bincount(stale) / stale.size)}
    out["rollout/num_sampled_tokens"] = float(stale.size)
    out["rollout/num_tokens"] = float(lengths.sum() + prompts.sum())
    return out


def _mean(name: str, values: np.ndarray) -> dict[str, float]:
    return {name: float(values.mean())} if values.size else {}


def _spread(name: str, values: np.ndarray) -> dict[str, float]:
    if values.size == 0:
        return {}
    found = {"mean": values.mean(), "max": values.max(), "min": values.min()}
    return {f"{name}/{statistic}": float(value) for statistic, value in found.items()}


def _components(groups: Sequence[Group]) -> dict[str, float]:
    """Returns the mean of each component over the scored rollouts that have it. NaN marks a rollout without it."""
    out = {}
    for name in sorted({name for group in groups for name in group.components}):
        values = np.concatenate([group.components[name][group.scored] for group in groups if name in group.components])
        out |= _mean(f"reward/{name}/mean", values[~np.isnan(values)].astype(np.float64))
    return out


def _sources(groups: Sequence[Group]) -> dict[str, float]:
    """Returns share and mean reward of each source, or nothing where all groups are of one."""
    known = sorted({group.prompt.source for group in groups})
    out: dict[str, float] = {}
    for source in known if len(known) > 1 else ():
        own = [group for group in groups if group.prompt.source == source]
        rewards = np.concatenate([group.rewards[group.scored] for group in own]).astype(np.float64)
        out |= {f"data/{source}/share": len(own) / len(groups)} | _mean(f"data/{source}/score/mean", rewards)
    return out


def _variation(groups: Sequence[Group]) -> dict[str, float]:
    """Returns how rewards differ within groups. A group of one rollout, as of supervised training, compares nothing."""
    groups = [group for group in groups if len(group.rollouts) > 1]
    if not groups:
        return {}
    known = [group for group in groups if group.scored.any()]
    deviations = np.array([group.rewards[group.scored].astype(np.float64).std() for group in known])
    equal = [not group.scored.any() or np.ptp(group.rewards[group.scored]) == 0 for group in groups]
    return _mean("reward_std", deviations) | {"frac_reward_zero_std": float(np.mean(equal))}


class Called:
    """Calls a function of a program with each row as a dict, "step" first."""

    def __init__(self, function: Callable[[dict], object]):
        self._function = function

    def write(self, step: int, row: Mapping[str, float]) -> None:
        self._function({"step": step} | {name: float(row[name]) for name in sorted(row)})

    def close(self) -> None:
        pass


class Plain:
    """Writes one line per row that has anything to show, for logs and pipes."""

    def __init__(self, steps: int, stream: TextIO, columns: _Columns = COLUMNS):
        self._steps, self._stream, self._columns = steps, stream, columns

    def write(self, step: int, row: Mapping[str, float]) -> None:
        shown = [f"{name} {text}" for name, text in _cells(row, self._columns).items()] + _evaluation(row)
        if shown:
            self._stream.write("  ".join([f"step {step}/{self._steps}", *shown]) + "\n")
            self._stream.flush()

    def close(self) -> None:
        pass


class Live:
    """Draws a progress bar over a table of the last rows. Every row redraws it, without a thread or a timer."""

    def __init__(self, steps: int, console: rich.console.Console, columns: _Columns = COLUMNS):
        self._rows: deque[tuple[int, dict[str, str]]] = deque(maxlen=_SHOWN)
        self._columns = columns
        self._evaluation = ""
        self._progress = rich.progress.Progress(
            rich.progress.TextColumn("step"),
            rich.progress.MofNCompleteColumn(),
            rich.progress.BarColumn(None),
            rich.progress.TimeElapsedColumn(),
            console=console,
            auto_refresh=False,
        )
        self._task = self._progress.add_task("steps", total=steps)
        self._live = rich.live.Live(self._drawn(), console=console, auto_refresh=False)
        self._live.start(refresh=True)

    def write(self, step: int, row: Mapping[str, float]) -> None:
        cells, evaluation = _cells(row, self._columns), _evaluation(row)
        if cells:
            self._rows.append((step, cells))
        if evaluation:
            self._evaluation = f"evaluated at step {step}: " + "  ".join(evaluation)
        self._progress.update(self._task, completed=step)
        self._live.update(self._drawn(), refresh=True)

    def close(self) -> None:
        self._live.stop()

    def _drawn(self) -> rich.console.Group:
        names = [name for name in self._columns if any(name in cells for _, cells in self._rows)]
        table = rich.table.Table("step", *names, box=None, pad_edge=False)
        for column in table.columns:
            column.justify = "right"
        for step, cells in self._rows:
            table.add_row(str(step), *(cells.get(name, "") for name in names))
        return rich.console.Group(self._progress, table, self._evaluation)


def console(
    steps: int, stream: TextIO | None = None, *, columns: _Columns = COLUMNS, quiet: bool = False
) -> Plain | Live:
    """Returns the live table if `stream` (default: standard output) is a terminal, else a writer of plain lines.

    `columns`: what a step shows. `quiet`: plain lines on a terminal too.
    """
    screen = rich.console.Console(file=stream or sys.stdout)
    if quiet or not screen.is_terminal:
        return Plain(steps, stream or sys.stdout, columns)
    return Live(steps, screen, columns)


class Several:
    """Passes each row to several writers."""

    def __init__(self, *writers: metric_rows.Jsonl | Plain | Live | Called):
        self._writers = writers

    def write(self, step: int, row: Mapping[str, float]) -> None:
        for writer in self._writers:
            writer.write(step, row)

    def close(self) -> None:
        for writer in self._writers:
            writer.close()


def _cells(row: Mapping[str, float], columns: _Columns) -> dict[str, str]:
    out = {}
    for heading, (names, form) in columns.items():
        name = next((name for name in names if name in row), None)
        if name is not None:
            out[heading] = format(float(row[name]), form)
    return out


def _evaluation(row: Mapping[str, float]) -> list[str]:
    """Returns the figures of an evaluation: of held-out completions, and accuracies without val-core/ or val-aux/."""
    return [f"{name} {float(row[name]):.4f}" for name in _WRITTEN if name in row] + [
        f"{name.split('/', 1)[1]} {float(row[name]):.4f}"
        for name in sorted(row)
        if name.startswith("val-core/") or (name.startswith("val-aux/") and name.endswith("/greedy"))
    ]
