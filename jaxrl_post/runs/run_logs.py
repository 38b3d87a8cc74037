"""The folder of a run, read and never changed: its config, its metrics, and its rollouts by step and by name.

A job of several processes logs below process_K. All of them log the same, so the logs of process 0 are read.

Rollouts have names as text: train:PROMPT:EPOCH:SAMPLE[:ATTEMPT] and eval@STEP:PROMPT:EPOCH:SAMPLE[:ATTEMPT]. A name is a
rollout's id without the run's seed. Every evaluation samples with the same ids, so the name of such a rollout has the step
of its evaluation. Without a purpose in front a name is one of training.

Invariant: `parsed_name(str(name)) == name`. The attempt is left out where it is 0 and the prompt's id has no colon.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from jaxrl_post.config import refuse_url
from jaxrl_post.data import tokenizer
from jaxrl_post.ring.json_text import read_object, shown
from jaxrl_post.ring.types import Group, Rollout, RolloutId
from jaxrl_post.runs import metric_rows, rollout_log
from jaxrl_post.runs.rollout_log import Scores

_PURPOSE = re.compile(r"(train|eval@(\d{1,18})):")
_FORM = "train:PROMPT:EPOCH:SAMPLE or eval@STEP:PROMPT:EPOCH:SAMPLE, with :ATTEMPT behind it where that is not 0"
FOLDERS = {"train": "rollouts", "eval": "evaluations"}


class Name(NamedTuple):
    """A rollout of a run. `step`: of its evaluation; None: it is one of training."""

    step: int | None
    prompt_id: str
    epoch: int
    sample: int
    attempt: int = 0

    @property
    def purpose(self) -> str:
        return "train" if self.step is None else "eval"

    def __str__(self) -> str:
        purpose = "train" if self.step is None else f"eval@{self.step}"
        attempt = [self.attempt] if self.attempt or ":" in self.prompt_id else []
        return ":".join(map(str, (purpose, self.prompt_id, self.epoch, self.sample, *attempt)))

    def is_of(self, id: RolloutId) -> bool:
        """Returns whether it names this rollout, apart from the step of an evaluation."""
        return (self.purpose, *self[1:]) == (id.purpose, id.prompt_id, id.epoch, id.sample, id.attempt)


def name_of(id: RolloutId, step: int) -> Name:
    """Returns the name of a rollout from the log of this step."""
    return Name(None if id.purpose == "train" else step, id.prompt_id, id.epoch, id.sample, id.attempt)


def parsed_name(text: str) -> Name:
    """Returns the name that a text says.

    Raises:
      ValueError: it is none. One sentence with the form.
    """
    purpose = _PURPOSE.match(text)
    step = int(purpose[2]) if purpose and purpose[2] else None
    fields = text[purpose.end() if purpose else 0 :].split(":")
    count = 3 if len(fields) > 3 and all(map(_is_number, fields[-3:])) else 2
    numbers = fields[-count:]
    if len(fields) <= count or not all(map(_is_number, numbers)):
        raise ValueError(f"{shown(text)} names no rollout: write {_FORM}; `rollouts RUN` prints the names")
    return Name(step, ":".join(fields[:-count]), *map(int, numbers))


def _is_number(text: str) -> bool:
    return re.fullmatch(r"[0-9]{1,18}", text) is not None


@dataclass(frozen=True)
class RunLogs:
    """The files of a run, which may still go on. What a property has read is not read again."""

    folder: Path

    @cached_property
    def _config(self) -> dict[str, Any]:
        return read_object(self.folder / "config.json", str(self.folder / "config.json"))

    @property
    def kept(self) -> dict[str, Any]:
        """Returns the config as nested dicts."""
        return {name: value for name, value in self._config.items() if name != "derived"}

    @property
    def derived(self) -> dict[str, Any]:
        """Returns what else the run was keyed by, such as versions."""
        derived = self._config.get("derived", {})
        return derived if isinstance(derived, dict) else {}

    @cached_property
    def mine(self) -> Path:
        """Returns where logs lie: in the folder, or below process_0 in a job of several processes."""
        first = self.folder / "process_0"  # a run that goes on in one process may still have one
        alone = self.derived.get("processes") == 1 and (self.folder / "metrics.jsonl").is_file()
        return self.folder if alone or not first.is_dir() else first

    @property
    def written(self) -> bool:
        """Whether the data holds the rollouts, so that their rewards say nothing of the policy."""
        return self.kept.get("engine", {}).get("name", "rows") != "rows"

    @cached_property
    def summary(self) -> dict[str, Any]:
        """Returns summary.json, or an empty mapping before the run has ended."""
        file = self.folder / "summary.json"
        return read_object(file, str(file)) if file.is_file() else {}

    @cached_property
    def rows(self) -> list[dict[str, float]]:
        """Returns the rows of metrics.jsonl, without a last line that is still being written. null becomes NaN.

        Raises:
          ValueError: a line is no JSON object.
        """
        return _lines(self.mine / "metrics.jsonl")

    @property
    def changed(self) -> float:
        """Returns when metrics.jsonl was last written, in seconds as time.time() gives it."""
        return (self.mine / "metrics.jsonl").stat().st_mtime

    @property
    def step_rows(self) -> list[dict[str, float]]:
        """Returns the rows of optimizer steps. The other rows are those of evaluations."""
        return [row for row in self.rows if metric_rows.is_of_step(row)]

    def steps(self, purpose: str) -> list[int]:
        """Returns the steps of logged training rounds ("train") or of logged evaluations ("eval"), in order."""
        files = (self.mine / FOLDERS[purpose]).glob("step_*.npz")
        return sorted(int(number) for file in files if (number := file.stem.removeprefix("step_")).isdigit())

    def num_rollouts(self, purpose: str) -> int:
        """Returns the number of rollouts that were logged."""
        index = _lines(self.mine / FOLDERS[purpose] / "index.jsonl")
        return sum({line["step"]: int(line["num_rollouts"]) for line in index}.values())

    def groups(self, purpose: str, step: int) -> tuple[Group, ...]:
        """Returns the groups of one of `steps`."""
        return rollout_log.read(self._file(purpose, step))

    def scores(self, purpose: str, step: int) -> list[Scores]:
        """Returns what the groups of one of `steps` scored."""
        return rollout_log.scores(self._file(purpose, step))

    def lengths(self, purpose: str, step: int) -> np.ndarray:
        """Returns the lengths of the rollouts of one of `steps`, in tokens."""
        return rollout_log.lengths(self._file(purpose, step))

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
            seen += [name_of(id, step) for id in ids]
        raise ValueError(f"{self.folder} has logged no rollout {shown(str(name))}; {_nearest(name, seen)}")

    def _evaluation(self, step: int) -> list[int]:
        there = self.steps("eval")
        if step not in there:
            raise ValueError(f"{self.folder} has no evaluation of step {step}; it has those of steps {there}")
        return [step]

    def _file(self, purpose: str, step: int) -> Path:
        return self.mine / FOLDERS[purpose] / f"step_{step:06d}.npz"


def opened(folder: str | Path) -> RunLogs:
    """Opens the folder of a run.

    Raises:
      ValueError: it is none, or a URL, or its config.json cannot be read.
    """
    refuse_url(str(folder), "RUN")
    logs = RunLogs(Path(folder))
    if not logs.folder.is_dir():
        raise ValueError(f"{folder}: there is no such folder; name the folder of a run, for example runs/demo-0-001")
    if not (logs.folder / "config.json").is_file():
        held = ", ".join(sorted(path.name for path in logs.folder.iterdir())[:3]) or "nothing"
        raise ValueError(f"{folder} is no folder of a run: it has no config.json (it holds {held})")
    _ = logs.mine  # reads the config
    return logs


def _lines(file: Path) -> list[dict]:
    """Returns the objects of a file of JSON lines, without a last line that is still being written; [] without the file.

    Raises:
      ValueError: another line is no JSON object.
    """
    return metric_rows.read(file, growing=True) if file.is_file() else []


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


def tokenizer_of(logs: RunLogs) -> tokenizer.Tokenizer:
    """Returns the tokenizer beside RUN/policy, else that of the run's config.

    Raises:
      ValueError: there is no tokenizer in either place.
    """
    policy, model = logs.folder / "policy", logs.kept.get("model", {})
    if (policy / "tokenizer.json").is_file():
        place = policy
    elif len(beside := sorted(policy.glob("tok*.bin"))) == 1:
        place = beside[0]
    elif model.get("tokenizer"):
        place = Path(model["tokenizer"])
    elif model.get("path"):
        place = tokenizer.beside(model["path"])
    else:
        raise ValueError(f"{logs.folder}: config.json names no model and no tokenizer, so that no text can be read")
    try:
        return tokenizer.load(place)
    except OSError as error:
        raise ValueError(f"the tokenizer {place} of {logs.folder} cannot be read: {error.strerror}") from error
