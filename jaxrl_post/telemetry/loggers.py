"""Writers of metrics to TensorBoard (tensorboardX) and to Weights & Biases.

Invariant: each gets exactly the rows of metrics.jsonl. A resumed run continues the same curves. A step that was written
before the kill and comes again is there once:

- TensorBoard: a mark in the new file tells readers to drop what came from that step on (`purge_step`).
- Weights & Biases offline: the rows are written again into one new file.
- Weights & Biases online: the server takes nothing back, so a step that it has is not sent again.

Both libraries are extras of the package and are imported only where the config asks for them.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import math
import re
import shutil
import socket
import time
import uuid
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from jaxrl_post.config import LoggerConfig
from jaxrl_post.ring import written
from jaxrl_post.ring.json_text import said

RUN_ID = "wandb.json"  # in the run's folder: the id of the run at Weights & Biases


def check(about: LoggerConfig) -> None:
    """Checks that the libraries are installed. Nothing is imported.

    Raises:
      ValueError: one is missing.
    """
    chosen = [("tensorboard", "tensorboardX", about.tensorboard), ("wandb", "wandb", about.wandb != "off")]
    for option, library, wanted in chosen:
        if wanted and importlib.util.find_spec(library) is None:
            value = str(getattr(about, option)).lower()
            raise ValueError(
                f"logger.{option}={value} needs the library {library}, which is not installed: "
                f"pip install 'jaxrl_post[{option}]', or leave the option out"
            )


def opened(about: LoggerConfig, place: Path, config: Mapping, kept: Sequence[Mapping]) -> list[TensorBoard | WandB]:
    """Opens the chosen writers, in the order of the options.

    Args:
      place: the run's folder.
      config: the run's options, which Weights & Biases shows.
      kept: rows of metrics.jsonl that a resumed run keeps. Empty for a new run.

    Raises:
      ValueError: a library is missing, or Weights & Biases refuses the run.
    """
    check(about)
    writers: list[TensorBoard | WandB] = []
    if about.tensorboard:
        writers.append(TensorBoard(place / "tensorboard", kept))
    if about.wandb != "off":
        writers.append(WandB(about, place, config, kept))
    return writers


class TensorBoard:
    """Writes an event for each row, in the file when `write` returns. Values are float32 there."""

    def __init__(self, folder: Path, kept: Sequence[Mapping]):
        from tensorboardX.proto.event_pb2 import Event, SessionLog
        from tensorboardX.record_writer import RecordWriter

        again = folder.is_dir()
        folder.mkdir(exist_ok=True)
        self._path = folder / _next_name(folder)
        self._file = RecordWriter(str(self._path))
        self._add(Event(wall_time=time.time(), file_version="brain.Event:2"))
        first = 0  # the first step that is written again: all of them where this is the first file
        if again:
            first = int(kept[-1]["step"]) if kept else 0
            mark = SessionLog(status=SessionLog.START)
            self._add(Event(wall_time=time.time(), step=first, session_log=mark))
        for row in kept:
            if row["step"] >= first:
                self.write(row["step"], _without_step(row))

    def write(self, step: int, row: Mapping[str, float]) -> None:
        """Writes the event of a row.

        Raises:
          OSError: it cannot be written. Nothing is written after that.
        """
        from tensorboardX.proto.event_pb2 import Event
        from tensorboardX.proto.summary_pb2 import Summary

        values = [Summary.Value(tag=name, simple_value=value) for name, value in _numbers(row).items()]
        self._add(Event(wall_time=time.time(), step=step, summary=Summary(value=values)))

    def _add(self, event: Any) -> None:
        try:
            with written.naming(self._path):
                self._file.write(event.SerializeToString())
                self._file.flush()
        except OSError:
            with contextlib.suppress(OSError):  # of what waits in memory
                self.close()
            raise

    def close(self) -> None:
        """Closes the file. A second call does nothing."""
        file, self._file = self._file, None
        if file is not None:
            file.close()


def _next_name(folder: Path) -> str:
    """Returns a name that follows all before it, whatever the clock says: readers take files in the order of their names."""
    there = (re.match(r"events(?:_([0-9]+))?\.", path.name) for path in folder.iterdir())
    number = 1 + max((int(found[1] or 0) for found in there if found), default=-1)
    return f"events{f'_{number:06d}' if number else ''}.out.tfevents.{time.time():.0f}.{socket.gethostname()}"


class WandB:
    """Sends rows to Weights & Biases, or writes them below RUN/wandb without a network.

    It merges the rows of a step, and stores them when a later step comes or at `close`. After a kill its file may lack
    the last rows, which a resumed run writes again.
    """

    def __init__(self, about: LoggerConfig, place: Path, config: Mapping, kept: Sequence[Mapping]):
        import wandb

        id = _run_id(place / RUN_ID)
        if about.wandb == "offline":  # what an earlier process wrote is written again, whole and once
            for before in (place / "wandb").glob(f"offline-run-*-{id}"):
                shutil.rmtree(before)
        try:
            self._run = wandb.init(
                project=about.project,
                name=about.name or place.resolve().name,
                id=id,
                resume="allow" if about.wandb == "online" else None,
                mode=about.wandb,
                dir=str(place),
                config=dict(config),
                settings=wandb.Settings(console="off", silent=True),
            )
        except wandb.errors.Error as error:
            raise ValueError(
                f"logger.wandb={about.wandb}: {said(error)}; log in with `wandb login`, or write logger.wandb=offline"
            ) from error
        self._has = self._run.starting_step - 1  # the last step that the server has
        for row in kept:
            self.write(row["step"], _without_step(row))

    def write(self, step: int, row: Mapping[str, float]) -> None:
        if step > self._has:
            self._run.log(_numbers(row), step=step)

    def close(self) -> None:
        """Stores the last step. A second call does nothing."""
        if self._run is not None:
            self._run.finish()
            self._run = None


def _run_id(file: Path) -> str:
    """Returns the id of the run at Weights & Biases. It is drawn once and kept in the file."""
    if not file.is_file():
        written.whole(file, json.dumps({"id": uuid.uuid4().hex[:12]}) + "\n")
    return json.loads(file.read_text(encoding="utf-8"))["id"]


def _without_step(row: Mapping[str, float]) -> dict[str, float]:
    return {name: value for name, value in row.items() if name != "step"}


def _numbers(row: Mapping[str, Any]) -> dict[str, float]:
    """Returns the numbers as metrics.jsonl has them: what is not finite is NaN."""
    return {name: float(row[name]) if math.isfinite(row[name]) else math.nan for name in sorted(row)}
