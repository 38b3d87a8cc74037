"""The files of a run's folder, as a page and a terminal view read them. The run may still be going on."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from jaxrl_post.json_text import shown


@dataclass(frozen=True)
class RunFiles:
    """A run's folder. `own`: where process 0 writes, which is the folder itself in a job of one process."""

    folder: Path

    @property
    def own(self) -> Path:
        return self.folder / "process_0" if self.derived.get("processes", 1) > 1 else self.folder

    @cached_property
    def config(self) -> dict[str, Any]:
        """Returns config.json, without what was derived."""
        return {name: value for name, value in self._told("config.json").items() if name != "derived"}

    @cached_property
    def derived(self) -> dict[str, Any]:
        return self._told("config.json").get("derived", {})

    @property
    def written(self) -> bool:
        """Whether the data holds the rollouts, so that their rewards say nothing of the policy."""
        return self.config.get("engine", {}).get("name", "rows") != "rows"

    @cached_property
    def summary(self) -> dict[str, Any]:
        """Returns summary.json, or an empty mapping before the run has ended."""
        return self._told("summary.json")

    @cached_property
    def rows(self) -> list[dict[str, float]]:
        """Returns the rows of metrics.jsonl, without a last line that is still being written. null becomes NaN."""
        return [
            {name: math.nan if value is None else value for name, value in row.items()}
            for row in self._lines(self.own / "metrics.jsonl")
        ]

    @property
    def steps(self) -> list[dict[str, float]]:
        """Returns the rows of optimizer steps. The other rows are those of evaluations."""
        return [row for row in self.rows if "training/global_step" in row]

    def logged(self, kind: str) -> dict[int, Path]:
        """Returns step -> rollout file, in order of steps. `kind`: rollouts or evaluations."""
        found = {
            int(line["step"]): self.own / kind / str(line["file"])
            for line in self._lines(self.own / kind / "index.jsonl")
        }
        return {step: found[step] for step in sorted(found) if found[step].is_file()}

    def rollouts_of(self, kind: str) -> int:
        """Returns the number of rollouts that were logged."""
        last = {int(line["step"]): int(line["num_rollouts"]) for line in self._lines(self.own / kind / "index.jsonl")}
        return sum(last.values())

    def _told(self, name: str) -> dict[str, Any]:
        file = self.folder / name
        return json.loads(file.read_text(encoding="utf-8")) if file.is_file() else {}

    def _lines(self, file: Path) -> Iterator[dict]:
        """Yields the objects of a file of JSON lines.

        Raises:
          ValueError: a line that is not the last one is no JSON.
        """
        if not file.is_file():
            return
        *lines, _ = file.read_text(encoding="utf-8", errors="replace").split("\n")
        for number, line in enumerate(lines, 1):
            try:
                yield json.loads(line)
            except ValueError as error:
                raise ValueError(f"{file}: line {number} is no JSON: {shown(line)}") from error


def opened(folder: str | Path) -> RunFiles:
    """Returns the files of a run.

    Raises:
      ValueError: the folder is no run's.
    """
    files = RunFiles(Path(folder))
    if not files.folder.is_dir():
        raise ValueError(f"{folder}: there is no such folder; name the folder of a run, for example runs/demo-0-001")
    if not (files.folder / "config.json").is_file():
        held = ", ".join(sorted(path.name for path in files.folder.iterdir())[:3]) or "nothing"
        raise ValueError(f"{folder} is not the folder of a run: it has no config.json (it holds {held})")
    return files
