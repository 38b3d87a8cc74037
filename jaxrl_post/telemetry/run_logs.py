"""The folder of a run, read and never changed: its config, its metrics, and its rollouts by step.

A job of several processes logs below process_K. All of them log the same, so the logs of process 0 are read.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jaxrl_post.json_text import read_object, shown
from jaxrl_post.telemetry import metrics, rollout_log, rollout_names
from jaxrl_post.telemetry.rollout_log import Scores
from jaxrl_post.telemetry.rollout_names import Name
from jaxrl_post.types import Group, Rollout

FOLDERS = {"train": "rollouts", "eval": "evaluations"}


@dataclass(frozen=True, kw_only=True)
class RunLogs:
    """The logs of a run.

    `kept`: its config as nested dicts. `derived`: what else it was keyed by, such as versions. `mine`: where logs lie.
    """

    folder: Path
    mine: Path
    kept: dict[str, Any]
    derived: dict[str, Any]

    def metrics(self) -> list[dict]:
        """Returns the rows of metrics.jsonl.

        Raises:
          ValueError: a line is no JSON.
        """
        file = self.mine / "metrics.jsonl"
        return metrics.read(file) if file.is_file() else []

    def steps(self, purpose: str) -> list[int]:
        """Returns the steps of logged training rounds ("train") or of logged evaluations ("eval"), in order."""
        files = (self.mine / FOLDERS[purpose]).glob("step_*.npz")
        return sorted(int(number) for file in files if (number := file.stem.removeprefix("step_")).isdigit())

    def groups(self, purpose: str, step: int) -> tuple[Group, ...]:
        """Returns the groups of one of `steps`."""
        return rollout_log.read(self._file(purpose, step))

    def scores(self, purpose: str, step: int) -> list[Scores]:
        """Returns what the groups of one of `steps` scored."""
        return rollout_log.scores(self._file(purpose, step))

    def find(self, name: Name) -> tuple[int, Rollout]:
        """Returns the step whose log holds a rollout, and the rollout.

        Raises:
          ValueError: no log holds it. The sentence names what is nearest.
        """
        seen: list[Name] = []
        for step in self.steps(name.purpose) if name.step is None else self._evaluation(name.step):
            ids = rollout_log.ids(self._file(name.purpose, step))
            if any(name.is_of(id) for id in ids):
                rollouts = (rollout for group in self.groups(name.purpose, step) for rollout in group.rollouts)
                return step, next(rollout for rollout in rollouts if name.is_of(rollout.id))
            seen += [rollout_names.of(id, step) for id in ids]
        raise ValueError(f"{self.folder} has logged no rollout {shown(str(name))}; {_nearest(name, seen)}")

    def _evaluation(self, step: int) -> list[int]:
        there = self.steps("eval")
        if step not in there:
            raise ValueError(f"{self.folder} has no evaluation of step {step}; it has those of steps {there}")
        return [step]

    def _file(self, purpose: str, step: int) -> Path:
        return self.mine / FOLDERS[purpose] / f"step_{step:06d}.npz"


def mine(folder: Path) -> Path:
    """Returns where the logs of a run lie: in its folder, or below process_0 in a job of several processes."""
    return folder / "process_0" if (folder / "process_0").is_dir() else folder


def opened(folder: str | Path) -> RunLogs:
    """Opens the folder of a run.

    Raises:
      ValueError: it is none, or its config.json cannot be read.
    """
    folder = Path(folder)
    if not (folder / "config.json").is_file():
        raise ValueError(f"{folder} is no folder of a run: it has no config.json")
    told = read_object(folder / "config.json", str(folder / "config.json"))
    derived = told.pop("derived", {})
    return RunLogs(folder=folder, mine=mine(folder), kept=told, derived=derived if isinstance(derived, dict) else {})


def _nearest(name: Name, seen: Sequence[Name]) -> str:
    """Says which logged rollouts a name is nearest to: of its prompt, or of the prompt with the nearest id."""
    if not seen:
        return f"there is no log of {FOLDERS[name.purpose]} yet"
    mine = [one for one in seen if one.prompt_id == name.prompt_id]
    if not mine:
        near = difflib.get_close_matches(name.prompt_id, list({one.prompt_id for one in seen}), n=1, cutoff=0.0)[0]
        mine = [one for one in seen if one.prompt_id == near]
    chosen = min(mine, key=lambda one: tuple(abs(a - b) for a, b in zip(one[2:], name[2:], strict=True)))
    return f"nearest is {shown(str(chosen), 200)}, one of {len(mine)} of that prompt"


def groups_of(run: RunLogs, purpose: str, first: int = 0, last: int | None = None) -> Iterator[tuple[int, Group]]:
    """Yields (step, group) of the steps from `first` to `last`, in order."""
    for step in run.steps(purpose):
        if first <= step and (last is None or step <= last):
            for group in run.groups(purpose, step):
                yield step, group
