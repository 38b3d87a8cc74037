"""Logged rollouts sampled once more: the run's ring turns again, from its last checkpoint before their first tokens.

Invariant: the ring is that of a run (main.run_training), built as a resumed run is. So a repeated rollout is equal to the logged
one bit for bit, with every version of the weights that sampled it.
"""

from __future__ import annotations

import contextlib
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from jaxrl_post import main
from jaxrl_post.launch import past_run
from jaxrl_post.launch.past_run import BEGINNING
from jaxrl_post.launch.stop_signal import Stopped
from jaxrl_post.ring.types import PER_TOKEN, Rollout, RolloutId
from jaxrl_post.runs import rollout_log
from jaxrl_post.runs.run_logs import Name, RunLogs
from jaxrl_post.telemetry.alarms import Diverged

SINGLE = ("finish", "start_clock", "finish_clock")


@dataclass(frozen=True, kw_only=True)
class Repeated:
    """A logged rollout and the one that the ring sampled again.

    `step`: whose log holds it. `begun`: the saved step from which the ring turned. `found`: None where the ring finished
    no such rollout. `restored`: its tokens that were in the checkpoint and not sampled again.
    """

    name: Name
    step: int
    begun: int
    logged: Rollout
    found: Rollout | None
    restored: int

    @property
    def differences(self) -> dict[str, int]:
        """Returns, by field, at how many tokens the two differ; where their lengths differ, by how many tokens."""
        if self.found is None:
            return {"tokens": len(self.logged)}
        pairs = {name: (getattr(self.logged, name), getattr(self.found, name)) for name in PER_TOKEN}
        out = {name: _different(*pair) for name, pair in pairs.items()}
        out["kept"] = self.logged.records.different(self.found.records)
        out |= {name: int(getattr(self.logged, name) != getattr(self.found, name)) for name in SINGLE}
        return {name: count for name, count in out.items() if count}

    @property
    def equal(self) -> bool:
        """Whether every token was sampled again, with equal bits in every field."""
        return not self.differences and self.restored == 0


class _Reached(BaseException):
    """Every rollout that was sought is finished. No part of the run shall take it for an error of its own."""


class _Finder:
    """A listener of the ring that keeps the sought rollouts and ends the turning once all are finished.

    A rollout that was deferred may finish more than once: the one at the logged clock is the one that was logged.

    Args:
      logged: the sought rollouts of training, by id.
      patience: engine steps after the last logged clock, from which on the ring does not repeat the run.
      evaluation: the file that is written by the evaluation whose rollouts are sought, if any are.
    """

    def __init__(self, logged: Mapping[RolloutId, Rollout], patience: int, evaluation: Path | None):
        self._logged, self._evaluation = logged, evaluation
        self._last = max((rollout.finish_clock for rollout in logged.values()), default=-1) + patience
        self.found: dict[RolloutId, Rollout] = {}

    def stepping(self, clock: int) -> None:
        if self._evaluation is not None and self._evaluation.is_file():
            raise _Reached

    def stepped(self, finished: Sequence[Rollout], clock: int) -> None:
        self.found |= {rollout.id: rollout for rollout in finished if rollout.id in self._logged}
        due = all(
            id in self.found and self.found[id].finish_clock == rollout.finish_clock
            for id, rollout in self._logged.items()
        )
        if self._logged and (due or clock > self._last):
            raise _Reached

    def launched(self, *_: object) -> None:
        """Needs nothing of it, as of the other events."""

    stopped = published = launched

    def close(self) -> None:
        """Has nothing to close."""


def repeated(logs: RunLogs, names: Sequence[Name], *, from_start: bool = False) -> list[Repeated]:
    """Samples logged rollouts again and returns them in the order of their names.

    Rollouts that begin at one checkpoint share one turn of the ring, and so do those of one evaluation. What the run
    prints goes to standard error.

    Args:
      from_start: turn the ring from the beginning of the run, not from the last checkpoint.

    Raises:
      ValueError: a rollout is not in the logs, its checkpoint was pruned or is damaged, the data are others, or a
        signal ended the turning.
    """
    found = {name: logs.find(name) for name in names}
    turns: dict[tuple[int, int | None], list[Name]] = {}
    for name, (_, rollout) in found.items():
        begun = BEGINNING if from_start else past_run.begin_at(logs, name, rollout)
        turns.setdefault((begun, name.step), []).append(name)
    out: dict[Name, Repeated] = {}
    for (begun, evaluation), some in turns.items():
        again, restored = _turned(logs, begun, evaluation, [found[name][1] for name in some])
        for name in some:
            step, logged = found[name]
            out[name] = Repeated(
                name=name,
                step=step,
                begun=begun,
                logged=logged,
                found=again.get(logged.id),
                restored=restored[logged.id],
            )
    return [out[name] for name in names]


def _turned(
    logs: RunLogs, begun: int, evaluation: int | None, sought: Sequence[Rollout]
) -> tuple[dict[RolloutId, Rollout], dict[RolloutId, int]]:
    """Turns the ring from a saved step. Returns the finished rollouts, and their tokens from the checkpoint."""
    with contextlib.ExitStack() as stack:
        stack.enter_context(contextlib.redirect_stdout(sys.stderr))
        place = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="replay-")))
        run = past_run.opened(logs, begun, place, stack)
        ids = [rollout.id for rollout in sought]
        restored = past_run.restored(run, ids)
        file = None if evaluation is None else run.mine / "evaluations" / f"step_{evaluation:06d}.npz"
        trained = {rollout.id: rollout for rollout in sought} if file is None else {}
        finder = _Finder(trained, run.config.engine.max_length, file)
        run.traces.append(finder)
        try:
            main.run_training(run)
        except _Reached:
            pass
        except (Stopped, Diverged) as error:
            raise ValueError(f"replay: {error}") from error
        if file is not None and file.is_file():
            groups = rollout_log.read(file)
            finder.found |= {rollout.id: rollout for group in groups for rollout in group.rollouts}
        return finder.found, restored


def _different(logged: np.ndarray, found: np.ndarray) -> int:
    """Returns at how many places the bytes of two vectors differ, or the difference of their lengths."""
    if logged.shape != found.shape:
        return abs(logged.size - found.size)
    bits = [np.frombuffer(one.tobytes(), np.uint8).reshape(one.size, one.itemsize) for one in (logged, found)]
    return int((bits[0] != bits[1]).any(axis=1).sum())
