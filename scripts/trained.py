"""Whole runs by the command line, as shows make them, and what a run left in its folder."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from jaxrl_post.runs import metric_rows


def run(
    record, config: str, folder: Path, options: str = "", *more: str, timeout_s: float, env: Mapping | None = None
) -> float:
    """Runs a config file into a folder, and returns its seconds.

    Args:
      options: as on a command line, each without its `--config.`. more: further ones, one text each, as values may have spaces.
        What begins with "--" stands as it is.
    """
    flags = (one if one.startswith("--") else f"--config.{one}" for one in (*options.split(), *more))
    command = ("-m", "jaxrl_post.main", f"--config={config}", f"--run-dir={folder}", *flags)
    return record.run(*command, timeout_s=timeout_s, env=env)


def rows(folder: Path, having: str = "step") -> list[dict[str, Any]]:
    """Returns the rows of metrics that have a name."""
    return [row for row in metric_rows.read(folder / "metrics.jsonl") if having in row]


def summary(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "summary.json").read_text())
